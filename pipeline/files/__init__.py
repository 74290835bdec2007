"""Read and write files on shared disks: retries when storage fails, digests, encoded messages, logs and small JSON files."""
