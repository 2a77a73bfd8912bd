"""`python -m dsv4_deploy`: the same program as the `dsv4-deploy` script."""

from dsv4_deploy.cli import main

if __name__ == "__main__":
    main()
