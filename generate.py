"""The command line. A prompt goes in, and its continuation comes out token by token, coloured by
origin.

    python generate.py "Once upon a time" --compare
    torchrun --nproc-per-node 2 generate.py "Once upon a time"      on two devices

The implementation is in support/generate.py.
"""
import sys

from support.generate import main

if __name__ == "__main__":
    sys.exit(main())
