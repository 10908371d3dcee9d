"""``python -m specgen`` is the command ``specgen``."""

from specgen.cli.main import main

if __name__ == "__main__":
    main()
