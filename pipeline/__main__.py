"""`python -m pipeline` runs the same command as `sm120`."""

from pipeline.cli.main import main

if __name__ == "__main__":
    main()
