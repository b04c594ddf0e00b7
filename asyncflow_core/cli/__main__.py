"""`python -m asyncflow_core.cli`, as launchers start it."""

from __future__ import annotations

import sys

from asyncflow_core.cli.main import main

sys.exit(main())
