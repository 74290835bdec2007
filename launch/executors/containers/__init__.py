"""Container runtimes: `cluster.container_runtime` names one, and each is one file. Start at runtime.py.

`runtimes.py` lists them. `image_files.py` reads the headers of images. `launch/preflight/container_images.py` checks images,
mounts and caches.
"""
