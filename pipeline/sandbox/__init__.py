"""Run programs that a model wrote in a sandbox, in which they can harm only themselves.

    sandbox       Sandbox.run and Sandbox.start, which the rest of the pipeline calls; tries bubblewrap on this node
    limits        the resources a program may use, and the result of a program
    guard_client  a rank's connection to a guard
    guard         the process between the rank and the program: starts it, watches it, ends it
    bubblewrap    finds bubblewrap and makes its command
    start         starts a program for the guard, in bubblewrap or without isolation
    library_path  folders of LD_LIBRARY_PATH that the interpreter needs
    file_system   the files that a program can see
    seccomp       the system calls that a program may make, and the kernel's filter of them
    cgroup        a memory cgroup for each program, where one is delegated
    linux         system calls that Python lacks, and limits that processes inherit
    processes     CPU time and memory of a tree of processes
    interpreter   the Python interpreter that a tool session runs inside the sandbox

    container         Container: the root of one episode, made from an image, in which programs run one after another
    shell             a shell in a container that lives across commands
    image             what an image is: squashfs, folder or OCI layout
    image_cache, unpack, squashfs_mount    what lies below a container's root: unpacked or mounted once on a node
    container_root    builds a container's root, and moves files in and out
    container_server  forks the processes that containers need

Start with `sandbox.py`. README.md states the guarantees and their limits, ATTACKS.md lists the attacks that were tried.

Each program gets its own guard process, so guards import little, and only from the standard library.

Leaves out: programs that need the Internet, a GPU or a terminal, and programs on more than one machine.
"""
