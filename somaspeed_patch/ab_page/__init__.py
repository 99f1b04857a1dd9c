"""The HTML page of `somaspeed ab`.

page.py        results -> one HTML file, by the template page.html.j2 and page.css
tables.py      what stands in its tables
provenance.py  command, commit, machine
charts*.py     one kind of chart each, by matplotlib, as SVG in two widths
"""
