"""Lets the tests of this folder import scripted_endpoint.py, which lies beside them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
