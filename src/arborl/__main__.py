import os
import sys

if __name__ == "__main__":  # processes that a comparison starts import this module too
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        # `python -m` lets every import look in the current folder. Only what a user names does (tools/imports.py).
        del sys.path[0]

    from .cli import main

    main()
