"""Code that runs inside the job. Start with `main.py`, every rank's entry point, and `coordinator.py`, the training loops.

Each package imports only from those below it in this list (`tests/test_imports.py` has the exact order).

    main                        the entry point of every rank
    coordinator, evaluation/    the two training loops; evaluations
    coordination/               rank 0's part: rollouts, refits, shared GPUs, saving, logging
    steering/                   changes of a live run
    roles/                      the verbs that ranks serve
    rollout/                    episodes
    refit/, rpc/                transfer of weights; calls of verbs
    monitor/, node_checks/      resources and warnings; checks of nodes
    train/, generate/           the backends of training and sampling
    environments/               rewards and tools
    job/, tracking/             the world, failures, deadlines; the feed of trackers
    checkpoints/, data/         checkpoints; data sets, chat templates, packing
    models/, observe/           model families; metrics
    config/, store/             keys and their checks; the authenticated rendezvous
    encryption/, lineage/       encrypted files; records of what a run is made from
    files/                      files on shared disks, digests, messages as bytes
    algorithms/                 losses, advantages and their keys
    node/, trackers/            the machine of a rank; experiment trackers
    seams/                      extras, and the events that they observe
    recipe/, sandbox/           problems, user code; programs of the policy
    types, boxes                the data between ranks

What submission reads imports torch only inside functions.
"""
