"""The kernel that the runner starts: IPython's own, and it ends when the runner is gone."""

from ipykernel.kernelapp import launch_new_instance

from reslab import lifeline

if __name__ == "__main__":
    lifeline.die_with_parent()
    launch_new_instance()
