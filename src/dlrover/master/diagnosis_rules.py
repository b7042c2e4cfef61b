"""What failures look like and what they mean: the table behind `dlrover.master.diagnosis`.

Rows are plain data. A failure gets the first row of its kind whose conditions all hold, and the last row
of each kind has none, so that every failure gets one.

Regular expressions ignore case, and ``^`` and ``$`` match at every line. In a process's stderr the line in
which the last match of ``text`` ends is the verdict's evidence. Titles and advice are
`str.format` templates with these fields:

``{error}``    name of the exception's type, without its module
``{code}``     exit code
``{signal}``   ``SIGKILL (signal 9)``
``{place}``    ``train.py:12``, the innermost line of the user's own code
``{subject}``  what the row's ``subject`` finds, else its ``otherwise``
"""

import signal

import msgspec

from dlrover.spec.failure import FailureKind, Origin


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row. A condition that is left at its default holds for every failure."""

    types: tuple[str, ...] = ()
    """Names of exception types, without their modules."""
    codes: tuple[int, ...] = ()
    """Exit codes or signal numbers."""
    text: str = ""
    """Regular expression, searched in the messages of the exception and of what it was raised from, or
    else in the end of stderr."""
    raised_in: str = ""
    """Regular expression, searched in the name of the file that raised the exception; the name is empty
    when the exception came up before the program's first line."""
    before_first_step: bool = False
    oom_killed: bool = False
    """The kernel's out-of-memory killer struck meanwhile."""

    origin: Origin
    hopeless: bool = False
    echo: bool = False
    """The failure may only follow from the end of another worker, or from being told to stop."""
    title: str
    """What happened to the rank, and after ``": "`` why: ``was ended by {signal}: it exceeded a limit``."""
    evidence: str = ""
    """Stands in for the evidence where the failure's own texts say nothing of its cause."""
    advice: str
    """One sentence: what to do next."""
    subject: str = ""
    """Regular expression whose first group that matched is what the advice speaks of."""
    otherwise: str = ""


_USER, _INFRASTRUCTURE, _UNKNOWN = Origin.USER, Origin.INFRASTRUCTURE, Origin.UNKNOWN

_CONNECTION_ERRORS = (
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
)
_NO_MEMORY = r"out of memory|can't allocate memory|cannot allocate memory|not enough memory"
_NO_SPACE = r"no space left on device|disk quota exceeded|disk is full"
_PORT_TAKEN = r"address already in use|EADDRINUSE"
# Every collective library words the loss of a peer in its own way; many names end in "ccl".
_PEER_GONE = (
    r"connection (closed|reset|refused|aborted)|broken pipe|socket closed|remote process exit"
    r"|\w+cclRemoteError|timed out waiting .*(recv|send|clients)|(socket|client socket).* timed? ?out"
    r"|failed to recv|heartbeat monitor"
)
_HEAP = (
    r"(free|malloc|realloc|munmap_chunk)\(\): |double free|corrupted (size|double)|stack smashing"
)

_ASK_PEERS = "Look for the peer that ended first; if none failed, a node or the network was lost."
_USE_LESS_MEMORY = (
    "Use a smaller batch, activation checkpointing or more shards, or a larger device."
)

_EXCEPTION_RULES = (
    Rule(
        types=("SyntaxError", "IndentationError", "TabError"),
        origin=_USER,
        hopeless=True,
        title="could not compile the program ({error})",
        advice="Correct the program at {place} and run it again.",
    ),
    Rule(
        types=("ImportError", "ModuleNotFoundError"),
        origin=_USER,
        hopeless=True,
        title="raised {error}",
        advice="Install the module for the workers' interpreter on every node, or correct the import.",
    ),
    Rule(
        types=("NameError", "UnboundLocalError"),
        origin=_USER,
        hopeless=True,
        title="raised {error}",
        advice="Define the name before its use at {place} and run again.",
    ),
    Rule(
        types=("FileNotFoundError",),
        raised_in=r"^$|\brunpy(\.py|>)$",
        origin=_USER,
        hopeless=True,
        title="found no program to run ({error})",
        advice="Give the path of a script that exists on every node.",
    ),
    Rule(
        raised_in=r"/(argparse|optparse|configparser)\.py$|/(hydra|omegaconf|jsonargparse|pydantic)/",
        before_first_step=True,
        origin=_USER,
        hopeless=True,
        title="rejected its arguments or configuration ({error})",
        advice="Correct the arguments or the configuration and run again.",
    ),
    Rule(
        text=_PORT_TAKEN,
        origin=_INFRASTRUCTURE,
        title="found its port taken ({error})",
        advice="Another process of this node holds the port ({subject}): stop it, or use another port.",
        subject=r"port:? ?(\d+)|', (\d+)\)|:(\d+)\b",
        otherwise="asked for at {place}",
    ),
    Rule(
        text=_NO_SPACE,
        origin=_INFRASTRUCTURE,
        title="found a disk full ({error})",
        advice="Free space for {subject}, or write to a larger file system, and run again.",
        subject=r"['\"<](/[^'\">]+)",
        otherwise="what is written at {place}",
    ),
    Rule(
        text=r"too many open files",
        origin=_INFRASTRUCTURE,
        title="reached the limit of open files ({error})",
        advice="Raise the limit of open files (ulimit -n) on the node, or close files at {place}.",
    ),
    Rule(
        text=r"killed by signal: bus error|insufficient shared memory|out of shared memory",
        origin=_INFRASTRUCTURE,
        title="found /dev/shm full ({error})",
        advice="Enlarge /dev/shm on the node (--shm-size of a container), or use fewer data loader workers.",
    ),
    Rule(
        text=r"DataLoader worker .*(is killed by signal|exited unexpectedly)",
        oom_killed=True,
        origin=_INFRASTRUCTURE,
        title="lost a data loader worker to the kernel's out-of-memory killer",
        advice="Give the node more memory, or use fewer data loader workers or less prefetching.",
    ),
    Rule(
        text=r"DataLoader worker .*(is killed by signal|exited unexpectedly)",
        origin=_UNKNOWN,
        title="lost a data loader worker ({error})",
        advice="Look for a crash of the data set's code, or run once with num_workers=0 to see its error.",
    ),
    Rule(
        types=("MemoryError", "OutOfMemoryError"),
        origin=_USER,
        title="ran out of memory ({error})",
        advice=_USE_LESS_MEMORY,
    ),
    Rule(
        types=("RuntimeError", "AcceleratorError", "OSError"),
        text=_NO_MEMORY,
        origin=_USER,
        title="ran out of memory ({error})",
        advice=_USE_LESS_MEMORY,
    ),
    Rule(
        types=("RuntimeError", "AcceleratorError"),
        text=r"device-side assert",
        origin=_USER,
        title="failed an assertion on the device ({error})",
        advice="Check that every index and label is within the range that the model was built for.",
    ),
    Rule(
        types=("RuntimeError", "AcceleratorError"),
        text=r"uncorrectable ecc|unspecified launch failure|device (is )?lost|fallen off the bus",
        origin=_INFRASTRUCTURE,
        title="lost its device to a hardware error ({error})",
        advice="Check the node's accelerators and keep the node out of the job until they are sound.",
    ),
    Rule(
        types=("DistBackendError",),
        text=r"invalid usage|invalid argument|duplicate gpu",
        origin=_USER,
        title="used a collective wrongly ({error})",
        advice="Give each rank a device of its own and equal collectives; the call is at {place}.",
    ),
    Rule(
        types=("DistBackendError", "DistNetworkError", "DistStoreError"),
        origin=_INFRASTRUCTURE,
        echo=True,
        title="lost the connection to its peers ({error})",
        advice=_ASK_PEERS,
    ),
    Rule(
        types=("RuntimeError",),
        text=_PEER_GONE,
        origin=_INFRASTRUCTURE,
        echo=True,
        title="lost the connection to its peers ({error})",
        advice=_ASK_PEERS,
    ),
    Rule(
        types=_CONNECTION_ERRORS,
        raised_in=r"/torch/distributed/",
        origin=_INFRASTRUCTURE,
        echo=True,
        title="lost the connection to its peers ({error})",
        advice=_ASK_PEERS,
    ),
    Rule(
        types=_CONNECTION_ERRORS,
        origin=_INFRASTRUCTURE,
        title="lost a network connection ({error})",
        advice="Check the service that {place} talks to and the network of the node.",
    ),
    Rule(
        types=("KeyboardInterrupt",),
        origin=_INFRASTRUCTURE,
        echo=True,
        title="was interrupted ({error})",
        advice="Run the same command again to go on from the last checkpoint.",
    ),
    Rule(
        origin=_USER,
        title="raised {error}",
        advice="Correct the program at {place}, then run the same command again.",
    ),
)

_EXIT_RULES = (
    Rule(
        codes=(2,),
        text=r"^usage: (?:[\s\S]*?\berror: )?",
        origin=_USER,
        hopeless=True,
        title="rejected its arguments (exit code {code})",
        advice="Correct the arguments of the program and run again.",
    ),
    Rule(
        codes=(2,),
        text=r"can't open file",
        origin=_USER,
        hopeless=True,
        title="found no program to run (exit code {code})",
        advice="Give the path of a script that exists on every node.",
    ),
    Rule(
        codes=(1,),
        text=r"^(SyntaxError|IndentationError|TabError): |: No module named ",
        origin=_USER,
        hopeless=True,
        title="could not load the program (exit code {code})",
        advice="Correct the program or the name of its module and run again.",
    ),
    Rule(
        codes=(126,),
        origin=_USER,
        hopeless=True,
        title="was given a command that is not executable (exit code {code})",
        advice="Make the command executable on every node, or name its interpreter.",
    ),
    Rule(
        codes=(127,),
        origin=_USER,
        hopeless=True,
        title="was given a command that was not found (exit code {code})",
        advice="Install the command on every node, or give its full path.",
    ),
    Rule(
        origin=_USER,
        title="left with exit code {code} (the program called exit or os._exit)",
        advice="Look in the program for what leaves with this code, and in the log for its last words.",
    ),
)

_SIGNAL_RULES = (
    Rule(
        codes=(signal.SIGKILL,),
        oom_killed=True,
        origin=_INFRASTRUCTURE,
        title="was killed by the kernel's out-of-memory killer with {signal}",
        evidence="the memory cgroup of the node counted an out-of-memory kill while the worker ran",
        advice="Give the node more memory, or use fewer data loader workers, less prefetching or caching.",
    ),
    Rule(
        codes=(signal.SIGKILL,),
        origin=_INFRASTRUCTURE,
        title="was killed by {signal}",
        evidence="killed from outside; the node's own memory cgroup shows no out-of-memory kill",
        advice="Ask the scheduler, the operators or the outer container's memory limit who killed it.",
    ),
    Rule(
        codes=(signal.SIGTERM,),
        origin=_INFRASTRUCTURE,
        echo=True,
        title="was asked to stop by {signal}: it came from outside the program",
        advice="Ask the scheduler whether the node was preempted; run again to go on from the last checkpoint.",
    ),
    Rule(
        codes=(signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
        origin=_INFRASTRUCTURE,
        echo=True,
        title="was interrupted by {signal}: it came from outside the program",
        advice="Run the same command again to go on from the last checkpoint.",
    ),
    Rule(
        codes=(signal.SIGUSR1, signal.SIGUSR2),
        origin=_INFRASTRUCTURE,
        title="was ended by {signal}: the program does not handle it",
        advice="Schedulers send this signal before they stop a job: handle it, or turn the warning off.",
    ),
    Rule(
        codes=(signal.SIGSEGV,),
        origin=_UNKNOWN,
        title="crashed with {signal}: native code touched memory that is not its own",
        advice="Suspect the native code called at {place}: update it, or report the crash to its authors.",
    ),
    Rule(
        codes=(signal.SIGBUS,),
        origin=_INFRASTRUCTURE,
        title="crashed with {signal}: memory backed by a file could not be had",
        advice="Enlarge /dev/shm or free the disk of the memory-mapped file, and see that nobody truncates it.",
    ),
    Rule(
        codes=(signal.SIGABRT,),
        text=r"watchdog .*(timeout|timed out)|watchdog thread terminated",
        origin=_INFRASTRUCTURE,
        echo=True,
        title="gave up with {signal}: its peers did not join a collective in time",
        advice="Look for the rank that failed first or hangs; a longer time-out helps only if it is slow.",
    ),
    Rule(
        codes=(signal.SIGABRT,),
        text=_HEAP,
        origin=_UNKNOWN,
        title="was aborted with {signal}: native code corrupted the memory",
        advice="Suspect the native code called at {place}: update it, or report the crash to its authors.",
    ),
    Rule(
        codes=(signal.SIGABRT,),
        text=r"^[ \t]*what\(\): |terminate called ",
        origin=_UNKNOWN,
        title="was aborted with {signal}: nothing caught a C++ exception",
        advice="Look up the C++ exception's text in the documentation of the library that threw it.",
    ),
    Rule(
        codes=(signal.SIGABRT,),
        origin=_UNKNOWN,
        title="aborted itself with {signal}",
        advice="Look in the log for the assertion that failed before the abort.",
    ),
    Rule(
        codes=(signal.SIGILL,),
        origin=_INFRASTRUCTURE,
        title="crashed with {signal}: the processor does not know an instruction",
        advice="Use a build of the native libraries that fits this node's processor.",
    ),
    Rule(
        codes=(signal.SIGFPE,),
        origin=_USER,
        title="crashed with {signal}: native code divided an integer by zero",
        advice="Look at the sizes and counts that are passed to native code at {place}.",
    ),
    Rule(
        codes=(signal.SIGXCPU, signal.SIGXFSZ),
        origin=_INFRASTRUCTURE,
        title="was ended by {signal}: it exceeded a limit of the node",
        advice="Raise the limit of processor time (ulimit -t) or file size (ulimit -f) for the job.",
    ),
    Rule(
        origin=_UNKNOWN,
        title="was ended by {signal}",
        advice="Find out who sends this signal, or handle it in the program.",
    ),
)

_SPAWN_RULES = (
    Rule(
        text=_NO_MEMORY + r"|resource temporarily unavailable|too many open files",
        origin=_INFRASTRUCTURE,
        title="could not be started: the node is at a limit",
        advice="Raise the node's limit of processes, memory or open files, and run again.",
    ),
    Rule(
        origin=_USER,
        hopeless=True,
        title="could not be started",
        advice="Correct the command: the program must exist and be executable on every node.",
    ),
)

RULES = {
    FailureKind.EXCEPTION: _EXCEPTION_RULES,
    FailureKind.EXIT: _EXIT_RULES,
    FailureKind.SIGNAL: _SIGNAL_RULES,
    FailureKind.SPAWN: _SPAWN_RULES,
}
