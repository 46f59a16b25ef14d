"""`python -m avref`."""

import sys

from avref.cli import main

sys.exit(main())
