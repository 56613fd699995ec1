import sys

from reslab.cli import main

sys.exit(main())
