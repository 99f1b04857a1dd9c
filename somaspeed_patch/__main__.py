"""`python -m somaspeed_patch ...` is the console script `somaspeed ...`."""

import sys

from somaspeed_patch.cli import main

if __name__ == "__main__":
    sys.exit(main())
