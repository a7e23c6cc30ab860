"""Measures what the checks before a run's start cost host 0, which serves all hosts: the CPU time of its process.

python -m benchmarks.coordination --hosts=64,256,1024

The other hosts are threads of a few processes. They exchange their facts over JAX's own service twice: first the facts
are equal on all hosts, then they differ on one host.
"""

import argparse
import multiprocessing
import os
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from jax._src.lib import _jax

from vit_jax import UserError
from vit_jax.distributed.coordination import ProcessGroup
from vit_jax.distributed.preflight import check_equal

PROCESSES = 24  # processes that hold the threads of all hosts but host 0; fewer would take far longer
FACTS = {f"--config.field{number}": "a value of some length, " * 2 for number in range(80)}  # 4.8 kB, like a run's
SPAWN = multiprocessing.get_context("spawn")


def compare(group: ProcessGroup) -> None:
    """Compares the facts of this host with those of the others, first equal ones and then different ones."""
    check_equal(group, FACTS)
    last = group.hosts - 1
    try:
        check_equal(group, FACTS | ({"--config.field0": "another"} if group.host == last else {}))
    except UserError as error:
        assert f"another on host {last}" in str(error)
    else:
        raise AssertionError("the difference was not noticed")


def run_hosts(address: str, node: int, numbers: range, hosts: int) -> None:
    """Runs some of the hosts as threads of this process, then ends the process.

    Args:
        address: the address of JAX's service.
        node: the number of this process, from 1.
        numbers: the numbers of the hosts in this process.
        hosts: the number of all hosts.
    """
    client = _jax.get_distributed_runtime_client(address, node, use_compression=True)
    client.connect()
    with ThreadPoolExecutor(len(numbers)) as pool:
        list(pool.map(lambda number: compare(ProcessGroup(client, number, hosts, Counter())), numbers))
    os._exit(0)  # a client that ends would wait for the others


def run_first(hosts: int) -> None:
    """Serves the exchanges and takes part as host 0, prints its CPU time, and ends the process."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    address, service = f"localhost:{port}", _jax.get_distributed_runtime_service(f"[::]:{port}", PROCESSES + 1)
    cuts = [1 + (hosts - 1) * number // PROCESSES for number in range(PROCESSES + 1)]
    parts = [range(cuts[number], cuts[number + 1]) for number in range(PROCESSES)]
    others = [SPAWN.Process(target=run_hosts, args=(address, node + 1, part, hosts)) for node, part in enumerate(parts)]
    for process in others:
        process.start()
    client = _jax.get_distributed_runtime_client(address, 0, use_compression=True)
    client.connect()
    start = time.process_time()
    compare(ProcessGroup(client, 0, hosts, Counter()))
    for process in others:
        process.join()
    codes = [process.exitcode for process in others]
    print(f"| {hosts:,} | {time.process_time() - start:.2f} |", flush=True)
    os._exit(0 if service and not any(codes) else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="64,256,1024", help="numbers of hosts [%(default)s]")
    print("| hosts | CPU seconds of host 0 |\n|---|---|", flush=True)
    for hosts in map(int, parser.parse_args().hosts.split(",")):
        process = SPAWN.Process(target=run_first, args=(hosts,))
        process.start()
        process.join()
        assert process.exitcode == 0, f"{hosts} hosts: exit code {process.exitcode}"


if __name__ == "__main__":
    main()
