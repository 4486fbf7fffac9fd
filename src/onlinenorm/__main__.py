"""The command `onlinenorm`, also as `python -m onlinenorm`."""

import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        from onlinenorm.cli import app

        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "onlinenorm":
            raise
        extra = "cli" if missing in ("torch", "typer", "rich") else "experiments"
        sys.exit(f"This command needs {missing}: pip install 'onlinenorm[{extra}]'")


if __name__ == "__main__":
    main()
