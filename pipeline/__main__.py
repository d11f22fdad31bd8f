"""`python -m pipeline` is the same door as `sm120`."""

from pipeline.cli.main import main

if __name__ == "__main__":
    main()
