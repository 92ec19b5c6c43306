"""`python -m scripts.bench`."""

import sys

from scripts.bench.main import main

if __name__ == "__main__":
    sys.exit(main())
