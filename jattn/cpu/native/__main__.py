"""`python -m jattn.cpu.native` builds the shared library."""

import sys

from jattn.cpu.native import build

if __name__ == "__main__":
    sys.exit(build.main())
