"""Says which worker it is."""

import os
import sys

sys.stdout.write(f"hello from rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n")
