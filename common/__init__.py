"""The shared module: everything the ten methods do alike."""
import os

# torch's threads (libgomp's) wait for each other by spinning. With its own 300,000 turns, two threads that share their cores with other work
# burn each other's time: an update of the tiny model took 9.9 s instead of 2.0 s. On quiet cores 3,000 turns cost nothing measurable;
# sleeping at once (OMP_WAIT_POLICY=PASSIVE) made decoding half as slow again. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


class UserError(Exception):
    """A mistake the user can mend: one sentence saying what, where and how. Commands print it and exit with code 2."""
