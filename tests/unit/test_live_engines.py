"""The connection between the endpoint and an engine."""

import socket
from contextlib import closing
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from threading import Thread

import pytest

from hybridrl.trainer.agents.engines import accepted


def test_only_who_knows_the_secret_is_accepted():
    """Neither a stranger that goes away nor one with another secret ends the wait."""
    with Listener(("127.0.0.1", 0), authkey=b"secret") as listener:
        found = []
        waiting = Thread(target=lambda: found.append(accepted(listener)), daemon=True)
        waiting.start()
        socket.create_connection(listener.address).close()
        with pytest.raises(AuthenticationError):
            Client(listener.address, authkey=b"another")
        assert waiting.is_alive()
        with closing(Client(listener.address, authkey=b"secret")) as engine:
            waiting.join(10)
            engine.send(3)
            assert found[0].recv() == 3
            found[0].close()
