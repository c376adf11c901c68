"""`python -m glm5` is `glm5`."""

from glm5.cli import main

if __name__ == "__main__":
    main()
