"""Files on shared disks: storage that fails, digests, messages as bytes, logs and small JSON files."""
