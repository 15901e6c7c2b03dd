from .cli import main

if __name__ == "__main__":  # processes that a comparison starts import this module too
    main()
