"""Record the inputs from which a run is made, and hash them while the run goes on. An extra, which the core does not import.

    input_records.py       the contents of a run's lineage/ folder and of a checkpoint's lineage.json
    file_hashes.py         SHA-256 of files, cached under the files' state
    lineage_observer.py    in the job: marks checkpoints, and hashes inputs in a thread

launch/governance lists the inputs at submission, and reads these records.
"""
