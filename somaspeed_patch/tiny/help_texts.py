"""LeRobot's command line without the help texts, which nobody reads of a tiny run.

For each of 1,400 options draccus looks the comment up in its class's source, 1.5 s of CPU a start: more
than ten updates of a tiny policy take.
"""

from __future__ import annotations


def drop() -> None:
    """Leave them out in this process from now on."""
    from draccus.wrappers import docstring

    docstring.get_attribute_docstring = lambda *_: docstring.AttributeDocString()
