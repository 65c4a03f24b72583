"""The tests and the processes that they start keep the byte code of the modules that they import.

Some images of containers set PYTHONDONTWRITEBYTECODE. Each process would then compile the package again, which takes as
long as all else that a short command does, and pytest would rewrite its assertions again. To be imported before the
package.
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
