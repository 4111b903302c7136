"""``python -m primal`` is the command ``primal``, for torchrun."""

import sys

from primal.cli import main

sys.exit(main())
