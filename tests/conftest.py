import os

os.environ["OMP_NUM_THREADS"] = "1"  # tests run beside other things; two OpenMP threads that wait for each other are slower than one

LONG = ("test_ranks.py", "test_faults.py", "test_run.py", "test_plan.py")


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
