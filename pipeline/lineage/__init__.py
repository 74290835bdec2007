"""Record what a run is made from, and hash it while the run goes on. An extra: the core imports none of it.

    input_records.py       what a run's lineage/ folder and a checkpoint's lineage.json hold
    file_hashes.py         SHA-256 of files, kept by the files' state
    lineage_observer.py    in the job: marks checkpoints, and hashes inputs in a thread

launch/governance lists the inputs at submission, and reads all of this.
"""
