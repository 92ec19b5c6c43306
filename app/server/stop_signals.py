"""Which signals end the server."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that this process ends with.

    A terminal that is closed sends SIGHUP.  `nohup` starts a process that ignores it, and so it stays.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,)))
