"""Runs a program that a model wrote, so that it can harm nothing but itself.

    sandbox       Sandbox.run, Sandbox.start: what the rest of the pipeline uses
    limits        what a program may use, and what came of it
    ways          bubblewrap or plain namespaces: which of them works on this node
    guarded       a rank's end of a guard
    guard         the process between the rank and the program: starts it, watches it, ends it
    bubblewrap, namespaces    the two ways in which the guard starts it
    linked        the libraries that the interpreter needs
    view          the files that the program can see
    calls         the system calls that it may make
    seccomp       the kernel's filter made of them
    cgroup        a memory cgroup for it, where one is delegated
    kernel        Linux's own calls, and the bounds that processes inherit
    processes     what its processes use

A guard is started for every program, so what it imports is small: the standard library alone, and little of it.

README.md says what is promised, what is not, and what was tried.

Left out: programs that need a network, a GPU or a terminal; more than one machine.
"""
