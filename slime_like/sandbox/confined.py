"""Runs a Python program that a model wrote so that it can only compute and print.

``code_tests`` starts this file as a script in a new interpreter, so it imports nothing from this package. It needs
Linux on x86-64. Landlock allows reading only Python's own files. Only listed system calls are allowed, and only listed
commands of those that have commands. Network, processes, signals to others and changes to files are not among them.
Limits bound memory, CPU time and output.
"""

import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

CANNOT_CONFINE = 120
"""Exit code if the kernel lacks a feature. Nothing was run."""

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2
_SIGKILL = 9

# linux/landlock.h; system calls of x86-64
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_ALL_ACCESS = (1 << 13) - 1  # governed by the first version; later versions add to it
_ADDED_ACCESS = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # rename across directories, truncate, ioctl of devices
_SCOPES, _SCOPES_SINCE = 1 << 0 | 1 << 1, 6  # abstract sockets and signals end at the sandbox

# linux/seccomp.h, linux/audit.h, linux/filter.h
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # refused with EPERM
_NO_SUCH_CALL = 0x00050000 | 38  # ENOSYS: the C library falls back to the older call
_X86_64 = 0xC000003E
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_X32 = 0x40000000
_CLONE_THREAD = 0x00010000
_CLONE, _CLONE3, _PRLIMIT, _IOCTL, _FCNTL = 56, 435, 302, 16, 72
_COMMANDS = {
    # FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS, TIOCGWINSZ
    _IOCTL: (0x541B, 0x5421, 0x5450, 0x5451, 0x5401, 0x5413),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; the kernel signals the process of F_SETOWN
    _FCNTL: (0, 1, 2, 3, 4, 1030),
}
"""Allowed values of the second argument."""
_ALLOWED = (
    # read, write, close, stat, fstat, lstat, poll, lseek, mmap, mprotect, munmap, brk
    0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
    # rt_sigaction, rt_sigprocmask, rt_sigreturn, pread64, pwrite64, readv, writev, access, pipe, select
    13, 14, 15, 17, 18, 19, 20, 21, 22, 23,
    # sched_yield, mremap, madvise, dup, dup2, pause, nanosleep, alarm, setitimer, getpid
    24, 25, 28, 32, 33, 34, 35, 37, 38, 39,
    # exit, uname, getcwd, readlink, gettimeofday, getrlimit, getrusage, sysinfo, times
    60, 63, 79, 89, 96, 97, 98, 99, 100,
    # getuid, getgid, geteuid, getegid, getppid, sigaltstack, arch_prctl, gettid, futex, sched_getaffinity
    102, 104, 107, 108, 110, 131, 158, 186, 202, 204,
    # getdents64, set_tid_address, clock_gettime, clock_getres, clock_nanosleep, exit_group, epoll_wait, epoll_ctl
    217, 218, 228, 229, 230, 231, 232, 233,
    # open, openat, newfstatat, readlinkat, faccessat, ppoll, set_robust_list, get_robust_list (files: Landlock)
    2, 257, 262, 267, 269, 271, 273, 274,
    # epoll_pwait, eventfd2, epoll_create1, dup3, pipe2, getrandom, statx, rseq, faccessat2
    281, 290, 291, 292, 293, 318, 332, 334, 439,
)  # fmt: skip


def _confine(memory_bytes: int, cpu_s: int, output_bytes: int) -> None:
    """Apply all limits to this process. Raises ``OSError`` if the kernel refuses one."""
    libc = ctypes.CDLL(None, use_errno=True)
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(limit)
        bound = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (bound, bound))
    _checked(libc, libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _restrict_files(libc)
    _restrict_system_calls(libc)


def _restrict_files(libc: Any) -> None:
    version = _checked(libc, libc.syscall(_CREATE_RULESET, None, 0, 1))
    governed = _ALL_ACCESS | sum(access for since, access in _ADDED_ACCESS.items() if version >= since)
    attributes = struct.pack("QQQ", governed, 0, _SCOPES if version >= _SCOPES_SINCE else 0)
    rules = _checked(libc, libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    for directory in {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64"}:
        try:
            opened = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:  # not every system has each
            continue
        rule = struct.pack("=Qi", _READ_FILE | _READ_DIR | _EXECUTE, opened)
        _checked(libc, libc.syscall(_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0))
        os.close(opened)
    _checked(libc, libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _restrict_system_calls(libc: Any) -> None:
    """Install a filter program over ``struct seccomp_data``: number, architecture, address, six arguments of 64 bits.

    Other calls are refused but not fatal: a library may try one and do without it.
    """
    number, architecture, first, second, third = 0, 4, 16, 24, 32
    lines = [
        (_LOAD, 0, 0, architecture),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, number),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        (_EQUAL, 0, 4, _CLONE),  # only for threads
        (_LOAD, 0, 0, first),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
        (_EQUAL, 0, 6, _PRLIMIT),  # only without a new limit
        (_LOAD, 0, 0, third),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, third + 4),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for call, commands in _COMMANDS.items():  # the kernel reads 32 bits of a command
        lines += [(_EQUAL, 0, 2 * len(commands) + 2, call), (_LOAD, 0, 0, second)]
        for command in commands:
            lines += [(_EQUAL, 0, 1, command), (_RETURN, 0, 0, _ALLOW)]
        lines.append((_RETURN, 0, 0, _REFUSE))
    for allowed in _ALLOWED:
        lines += [(_EQUAL, 0, 1, allowed), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _REFUSE))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    header = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program))
    _checked(libc, libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0))


def _checked(libc: Any, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main() -> None:
    """Run the message's program and its tests, then write the message's ``word`` to the descriptor ``verdict``."""
    parent, message, verdict = map(int, sys.argv[1:4])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    with os.fdopen(message, encoding="utf-8") as file:
        job = json.load(file)
    import traceback  # noqa: F401 (imported now: later, its file may not be read)

    program = compile(job.pop("program"), "response.py", "exec")
    tests = compile(job.pop("tests"), "tests.py", "exec")
    word = job.pop("word").encode()
    try:
        _confine(**job)
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(CANNOT_CONFINE)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)
    exec(tests, names)
    sys.stdout.flush()
    os.write(verdict, word)
    os._exit(0)


if __name__ == "__main__":
    main()
