"""The command `onlinenorm`, also as `python -m onlinenorm`."""

import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        from onlinenorm.cli import app
    except ModuleNotFoundError as error:
        sys.exit(f"The onlinenorm command needs {error.name}: pip install 'onlinenorm[cli]'")
    app()


if __name__ == "__main__":
    main()
