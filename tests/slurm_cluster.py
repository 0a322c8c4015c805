"""A real Slurm on one machine, in a folder of its own: `python tests/slurm_cluster.py FOLDER` starts one to play with.

munged, mariadbd, slurmdbd, slurmctld and three slurmd ("nodes" n1 to n3 of this host), with accounting that is
enforced: accounts proj and other; QoS normal, low, high (preempts low) and tiny (5 minutes, one GPU); partitions gpu,
cpu and debug (30 minutes). Each node claims 8 cores, 16 GB and 4 GPUs that are clones of /dev/null. Ports are chosen
free and everything is told by SLURM_CONF, so that a Slurm of the machine's own is left alone. Needs root and Debian's
packages slurmctld, slurmd, slurmdbd, slurm-client, munge and mariadb-server.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sbatch")
_PR_SET_PDEATHSIG = 1
NODES = ("n1", "n2", "n3")
CPUS, MEMORY_MB, GPUS = 8, 16_000, 4
ACCOUNTS = {"proj": "normal,low,high,tiny", "other": "normal"}


def missing() -> str | None:
    """Why a cluster cannot be started here, if so."""
    if os.geteuid() != 0:
        return "a Slurm of the tests' own needs root"
    lacking = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass
class Cluster:
    """The daemons of one cluster, by name; started and ended one by one where a test wants it."""

    root: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to talk to this cluster."""
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> Cluster:
        for name in ("log", "ctld", "mysql", "munge", *NODES):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        self.ports = _free_ports("ctld", "dbd", "mysql", *NODES)
        self._configure()
        self._munge()
        self._database()
        self._daemon("slurmdbd", ["slurmdbd", "-D"])
        self._until("slurmdbd", lambda: self.quiet("sacctmgr", "-n", "show", "cluster"))
        self._associations(first=True)
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self._associations(first=False)
        self._until(
            "the nodes", lambda: len(self.call("sinfo", "-hN", "-t", "idle", "-o", "%N").split()) >= 3 * len(NODES)
        )
        return self

    def _all_idle(self) -> bool:
        return set(NODES) <= set(self.call("sinfo", "-hN", "-t", "idle", "-o", "%N").split())

    def start_controller(self) -> None:
        self._daemon("slurmctld", ["slurmctld", "-D"])
        self._until("slurmctld", lambda: "UP" in self.call("scontrol", "ping"))

    def start_node(self, node: str) -> None:
        self._daemon(node, ["slurmd", "-D", "-N", node])

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End one daemon."""
        process = self.daemons.pop(name)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Cancel what is left and end every daemon, the last started first."""
        if "slurmctld" in self.daemons:
            self.clear()
        for name in reversed(list(self.daemons)):
            self.end(name)

    def clear(self) -> None:
        """Cancel every job, and wait until it is gone; what must run is started again."""
        if "slurmctld" not in self.daemons:
            self.start_controller()
        for node in NODES:
            if node not in self.daemons:
                self.start_node(node)
        self.call("scancel", "--me", "--full")
        self._until("an empty queue", lambda: not self.queue())

    # -- talking to it ------------------------------------------------------------------------------------------------

    def call(self, *words: str) -> str:
        """The standard output of a Slurm command; empty when it fails."""
        done = subprocess.run(words, env=self._env(), capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else ""

    def quiet(self, *words: str) -> bool:
        """Whether a Slurm command succeeds."""
        return subprocess.run(words, env=self._env(), capture_output=True, timeout=60).returncode == 0

    @property
    def next_job(self) -> int:
        """The id of the job that is submitted next."""
        found = re.search(r"NEXT_JOB_ID\s*=\s*(\d+)", self.call("scontrol", "show", "config"))
        assert found is not None
        return int(found[1])

    def jobs(self, first: int, *columns: str) -> list[tuple[str, ...]]:
        """What accounting says of the jobs from id `first` on, once it agrees with the controller on their states."""
        shown: list[list[str]] = []

        def settled() -> bool:
            queue = self.call("squeue", "-h", "-t", "all", "-o", "%A|%T").splitlines()
            known = dict(row.split("|") for row in queue)
            words = ["sacct", "-nXP", "--starttime=now-1days", f"--format=jobidraw,state,{','.join(columns)}"]
            rows = [row.split("|") for row in self.call(*words).splitlines()]
            shown[:] = sorted((row for row in rows if int(row[0]) >= first), key=lambda row: int(row[0]))
            states = {row[0]: row[1].split()[0] for row in shown}
            return all(states.get(job) == state for job, state in known.items() if int(job) >= first)

        self._until("accounting", settled)
        return [tuple(row[2:]) for row in shown]

    def queue(self) -> list[str]:
        """Ids of the jobs that wait, run or end."""
        return self.call("squeue", "-h", "-o", "%i").split()

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.environment, "PATH": _path()}

    # -- setting it up ------------------------------------------------------------------------------------------------

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command,
                env=self._env(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def _until(self, what: str, ready: Callable[[], object], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            dead = [name for name, process in self.daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"== {p.name}\n{p.read_text()[-1500:]}" for p in (self.root / "log").glob("*"))
                raise RuntimeError(f"{what} did not come up (ended: {dead})\n{logs}")
            time.sleep(0.1)

    def _munge(self) -> None:
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [f"--{name}-file={self.root}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        command = [
            "munged",
            "--foreground",
            "--force",
            "--num-threads=10",
            f"--socket={self.root}/munge/socket",
            *files,
        ]
        self._daemon("munged", command)
        self._until("munged", (self.root / "munge" / "socket").exists)

    def _database(self) -> None:
        data, log = self.root / "mysql", self.root / "log" / "mariadb-install"
        shutil.chown(data, "mysql", "mysql")
        words = ["--no-defaults", "--user=mysql", f"--datadir={data}"]
        with log.open("wb") as out:
            install = ["mariadb-install-db", *words, "--skip-test-db", "--auth-root-authentication-method=normal"]
            subprocess.run(install, env=self._env(), stdout=out, stderr=out, check=True)
        tune = ["--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
        place = [f"--socket={data}/socket", f"--pid-file={data}/pid", f"--port={self.ports['mysql']}"]
        self._daemon("mariadbd", ["mariadbd", *words, *tune, *place, "--bind-address=127.0.0.1"])
        ping = ["mariadb-admin", "--no-defaults", "-uroot", f"--socket={data}/socket", "ping"]
        self._until("mariadbd", lambda: self.quiet(*ping))

    def _configure(self) -> None:
        root, host = self.root, os.uname().nodename.split(".")[0]
        node = f"CPUs={CPUS} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB}"
        auth = f"AuthType=auth/munge\nAuthInfo=socket={root}/munge/socket\n"
        nodes = "".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={self.ports[name]}\n" for name in NODES
        )
        (root / "slurm.conf").write_text(
            f"""{auth}ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={self.ports["ctld"]}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/ctld
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/ctld/pid
SlurmdPidFile={root}/%n/pid
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=10000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={self.ports["dbd"]}
AccountingStoragePass={root}/munge/socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
PriorityType=priority/multifactor
PreemptType=preempt/qos
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
MinJobAge=300
SlurmdTimeout=10
SlurmctldTimeout=20
InactiveLimit=0
NodeName=DEFAULT {node} Gres=gpu:fake:{GPUS}
{nodes}PartitionName=DEFAULT Nodes=n[1-3] State=UP DefMemPerCPU=500
PartitionName=gpu Default=YES MaxTime=1-00:00:00 DefaultTime=00:10:00
PartitionName=cpu MaxTime=1-00:00:00 DefaultTime=00:10:00
PartitionName=debug MaxTime=00:30:00 DefaultTime=00:05:00
"""
        )
        for number in range(GPUS):
            os.mknod(root / f"nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
        (root / "gres.conf").write_text(f"Name=gpu Type=fake File={root}/nvidia[0-{GPUS - 1}]\n")
        database = root / "slurmdbd.conf"
        database.write_text(
            f"""{auth}DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={self.ports["dbd"]}
SlurmUser=root
PidFile={root}/ctld/dbd.pid
LogFile={root}/log/slurmdbd
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={self.ports["mysql"]}
StorageUser=root
StorageLoc=slurm
"""
        )
        database.chmod(0o600)

    def _associations(self, *, first: bool) -> None:
        def add(*words: str) -> None:
            self.call("sacctmgr", "-i", *words)

        if first:
            return add("add", "cluster", "test")
        add("add", "qos", "low", "priority=0", "preemptmode=requeue")
        add("add", "qos", "high", "priority=100", "preempt=low")
        add("add", "qos", "tiny", "priority=10", "maxwall=00:05:00", "maxtresperjob=gres/gpu=1")
        for account, qos in ACCOUNTS.items():
            add("add", "account", account, f"description={account}", "organization=test")
            add("add", "user", "root", f"account={account}", f"qos={qos}", "defaultqos=normal")
        add("modify", "user", "root", "set", "defaultaccount=proj")


def _end_with_parent() -> None:
    """Tests that are killed leave no daemon behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _free_ports(*names: str) -> dict[str, int]:
    """A free TCP port for each name; all are held until the last is found."""
    sockets = [socket.socket() for _ in names]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return {name: one.getsockname()[1] for name, one in zip(names, sockets, strict=True)}
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    began = time.monotonic()
    cluster = Cluster(Path(sys.argv[1]).absolute())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cluster.start()
        print(f"up after {time.monotonic() - began:.1f} s; export SLURM_CONF={cluster.root}/slurm.conf", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()
