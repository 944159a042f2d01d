"""`python -m zbus`: the command `zbus`, for a shell that does not find its script."""

from .cli import main

if __name__ == "__main__":
    main()
