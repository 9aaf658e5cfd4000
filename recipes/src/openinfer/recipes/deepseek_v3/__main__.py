"""`python -m openinfer.recipes.deepseek_v3 MODEL_DIR [flags]`: serve a checkpoint directly."""

import sys

from openinfer.frontend.serve import serve
from openinfer.recipes.deepseek_v3 import RECIPE

if __name__ == "__main__":
    sys.exit(serve(RECIPE, sys.argv[1:], prog="python -m openinfer.recipes.deepseek_v3"))
