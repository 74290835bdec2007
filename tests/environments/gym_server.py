"""Serve one resource server of NeMo Gym: `PYTHON gym_server.py PORT MODULE:CLASS`, with the package's Python (3.12).

Without its launcher, which starts all servers of a configuration with Ray.
"""

import importlib
import sys

import uvicorn


def main() -> None:
    from nemo_gym.config_types import BaseServerConfig  # pyright: ignore[reportMissingImports]
    from nemo_gym.server_utils import ServerClient  # pyright: ignore[reportMissingImports]
    from omegaconf import OmegaConf

    port, (module, name) = int(sys.argv[1]), sys.argv[2].split(":")
    server = getattr(importlib.import_module(module), name)
    config = server.model_fields["config"].annotation(name=name, host="127.0.0.1", port=port, entrypoint="app.py")
    head = BaseServerConfig(host="127.0.0.1", port=11000)
    made = server(config=config, server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})))
    uvicorn.run(made.setup_webserver(), host="127.0.0.1", port=port)


if __name__ == "__main__":
    main()
