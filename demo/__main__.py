"""``python -m headmux.demo``."""

import sys

from headmux.demo import main

if __name__ == "__main__":
    sys.exit(main())
