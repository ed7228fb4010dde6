"""One KFP face per stage: parse inputs, call one function of the library, publish what it made. No logic here."""

import functools
import os

from kfp import dsl

from occamy import __version__

IMAGE = os.environ.get("OCCAMY_IMAGE", f"occamy-python:{__version__}")
"""Image that holds this package, kfp and the trainer; `occamy compile --image` sets it."""

component = functools.partial(dsl.component, base_image=IMAGE, packages_to_install=[], install_kfp_package=False)
