"""A conversation with a model: its turns, and the commands that begin with a slash."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from app.commands.conversation.answer import Answer, receive
from app.commands.conversation.interrupts import Interrupts
from app.commands.conversation.lines import MessageReader
from app.commands.conversation.screen import Screen
from app.commands.errors import CommandError, RequestFailed
from app.commands.server.models import Model, find_model, progress_of, state_of
from app.commands.server.server_address import Server
from app.commands.server.server_client import fetch_models

_COMMAND: Final = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_NO_TEXT: Final = '""'


class _Command(NamedTuple):
    """What a user types, what it does, and how."""

    usage: str
    meaning: str
    run: Callable[["Session", str], None]


class Session:
    """Talks with a model until the input ends; an answer that the user stops is kept as far as it came."""

    def __init__(
        self,
        server: Server,
        model: str,
        reader: MessageReader,
        screen: Screen,
        *,
        system: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._server = server
        self._model = model
        self._reader = reader
        self._screen = screen
        self._system = system
        self._options = options or {}
        self._turns: list[dict[str, str]] = []
        self._is_over = False

    def run(self) -> None:
        """Answer messages until the user leaves."""
        self._screen.show_note(f"{self._model} at {self._server.url}; /help lists commands")
        interrupts = Interrupts()
        with interrupts.handled():
            while not self._is_over:
                try:
                    with interrupts.expected():
                        self._answer(self._reader.read_message())
                except KeyboardInterrupt:
                    self._screen.show_line()
                except EOFError:
                    self._screen.show_line()
                    return

    def _answer(self, message: str) -> None:
        found = _COMMAND.fullmatch(message)
        if not message:
            return
        if found is None:
            self._ask(message)
        elif command := _COMMANDS.get(found[1]):
            command.run(self, (found[2] or "").strip())
        else:
            self._screen.show_note(f"there is no command /{found[1]}; /help lists them")

    def _ask(self, message: str) -> None:
        """Show the answer to a message; what has no answer is forgotten, as if it was not asked."""
        question = {"role": "user", "content": message}
        answer = Answer()
        note = ""
        try:
            receive(self._server, self._body(question), answer, self._screen, self._show_waiting)
            if answer.finish_reason == "length":
                note = "(the answer is cut off at the limit of tokens)"
        except KeyboardInterrupt:
            note = "(stopped)"
        except (CommandError, RequestFailed) as error:
            note = str(error)
        if answer.text:
            self._turns += [question, {"role": "assistant", "content": answer.text}]
        self._screen.end_answer()
        if note:
            self._screen.show_note(note)

    def _body(self, question: Mapping[str, str]) -> dict[str, Any]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *self._turns, question]
        return {**self._options, "model": self._model, "messages": messages}

    def _show_waiting(self) -> None:
        """Show whether the model is being loaded."""
        try:
            model = find_model(fetch_models(self._server), self._model)
        except (CommandError, RequestFailed):
            model = {}
        is_loading = state_of(model) == "loading"
        what = f"loading {self._model}{progress_of(model)}" if is_loading else "waiting"
        self._screen.show_status(f"{what} ...")

    def _choose_model(self, name: str) -> None:
        try:
            models = fetch_models(self._server)
            if name:
                find_model(models, name)
        except (CommandError, RequestFailed) as error:
            self._screen.show_note(str(error))
            return
        if name:
            self._model = name
            self._screen.show_note(f"now with {name}")
        else:
            for model in models:
                self._show_model(model)

    def _show_model(self, model: Model) -> None:
        is_current = self._model in (model["id"], *model.get("aliases", ()))
        line = f"{'*' if is_current else ' '} {model['id']}  {state_of(model)}{progress_of(model)}"
        self._screen.show_line(line.rstrip())

    def _set_system(self, text: str) -> None:
        if text:
            self._system = "" if text == _NO_TEXT else text
        self._screen.show_note(f"system message: {self._system or 'none'}")

    def _clear(self, _: str) -> None:
        self._turns.clear()
        self._screen.show_note("the conversation is forgotten")

    def _help(self, _: str) -> None:
        for command in _COMMANDS.values():
            self._screen.show_line(f"{command.usage:<16} {command.meaning}")
        self._screen.show_line(
            '"""              begins and ends a message of several lines; so does \\'
        )
        self._screen.show_line("Ctrl-C           stops an answer; Ctrl-D ends the conversation")

    def _exit(self, _: str) -> None:
        self._is_over = True


_COMMANDS: Final[Mapping[str, _Command]] = {
    "model": _Command(
        "/model [NAME]", "lists the models, or changes to one", Session._choose_model
    ),
    "system": _Command(
        "/system [TEXT]",
        f"shows or sets the system message; {_NO_TEXT} is none",
        Session._set_system,
    ),
    "clear": _Command("/clear", "forgets the conversation", Session._clear),
    "help": _Command("/help", "lists the commands", Session._help),
    "exit": _Command("/exit", "ends the conversation", Session._exit),
}
