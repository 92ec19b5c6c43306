"""`python -m scripts.soak`."""

import sys

from scripts.soak.main import main

if __name__ == "__main__":
    sys.exit(main())
