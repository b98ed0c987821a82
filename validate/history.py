"""The history: every run's entries in one SQLite file that only grows.

Writers take SQLite's own lock, so two runs may append at once, and a killed one leaves either all of its entries or
none. The rollback journal instead of the write-ahead log: one file at rest, and no shared memory, which file systems of
networks lack.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

from models.errors import BadInput, ConvertError, EnvironmentProblem
from validate.entry import Entry, numbers

# In the file's header: what it is, and in which form.
APPLICATION, SCHEMA = 0x65644356, 1
# How long a writer waits for another one.
PATIENCE = 60.0
COLUMNS = tuple(field.name for field in fields(Entry) if field.name != "accepted")
# Values that are stored as JSON.
JSON_COLUMNS = ("versions", "figures", "nll", "gates")
TABLES = (
    f"CREATE TABLE entry ({', '.join(COLUMNS)}, PRIMARY KEY (run, target))",
    "CREATE TABLE accepted (run PRIMARY KEY, time)",
    *(
        f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON {table}"
        " BEGIN SELECT RAISE(ABORT, 'the history only grows'); END"
        for table in ("entry", "accepted")
        for verb in ("UPDATE", "DELETE")
    ),
)


class History:
    """A history file; it is made when something is appended.

    Raises:
        BadInput: from every method, when the file is no history, or one of a newer edge-convert.
        EnvironmentProblem: when it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[Entry]:
        """All of them, oldest first; none when there is no file."""
        if not self.path.is_file():
            return []
        with self._opened() as connection:
            if not _tables(connection):
                # A writer made the file, and has appended nothing yet.
                return []
            rows = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM entry ORDER BY rowid").fetchall()
            accepted = {run for (run,) in connection.execute("SELECT run FROM accepted")}
        return [_entry(row, accepted) for row in rows]

    def append(self, entries: Sequence[Entry]) -> None:
        """Adds a run's entries, all or none; they are on the disk when this returns."""
        marks = ", ".join("?" for _ in COLUMNS)
        with self._opened(write=True) as connection:
            connection.executemany(f"INSERT INTO entry VALUES ({marks})", [_row(entry) for entry in entries])

    def accept(self, run: str, time: str) -> None:
        """Notes that a run is good enough to compare later ones with, although a gate did not hold."""
        with self._opened(write=True) as connection:
            connection.execute("INSERT OR IGNORE INTO accepted VALUES (?, ?)", (run, time))

    def check(self) -> None:
        """Raises what the other methods would, before there is anything to append."""
        if self.path.exists() and not self.path.is_file():
            raise BadInput(f"{self.path}: expected a history file, found something else")
        self.entries()

    @contextmanager
    def _opened(self, write: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction, which ends with the block."""
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
        except sqlite3.Error as error:
            raise EnvironmentProblem(f"{self.path}: the history cannot be opened: {error}") from error
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            self._check_schema(connection, write)
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._problem(error) from error
        finally:
            # Without COMMIT nothing of the block stays.
            connection.close()

    def _check_schema(self, connection: sqlite3.Connection, create: bool) -> None:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (schema,) = connection.execute("PRAGMA user_version").fetchone()
        if not _tables(connection) and not application:
            header = (f"PRAGMA application_id = {APPLICATION}", f"PRAGMA user_version = {SCHEMA}")
            for statement in (*TABLES, *header) if create else ():
                connection.execute(statement)
        elif application != APPLICATION:
            raise BadInput(f"{self.path}: expected a history of edge-convert, found another SQLite file")
        elif schema > SCHEMA:
            raise BadInput(
                f"{self.path}: schema: expected {SCHEMA} at most, found {schema}: a newer edge-convert wrote it"
            )

    def _problem(self, error: sqlite3.Error) -> ConvertError:
        code = getattr(error, "sqlite_errorcode", None)
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return BadInput(f"{self.path}: expected a history of edge-convert, found: {error}")
        if code == sqlite3.SQLITE_FULL:
            return EnvironmentProblem(f"the disk is full while writing {self.path}: free some space")
        if code == sqlite3.SQLITE_BUSY:
            return EnvironmentProblem(f"{self.path}: another run has held the history for {PATIENCE:.0f} seconds")
        return EnvironmentProblem(f"{self.path}: the history cannot be used: {error}")


def _tables(connection: sqlite3.Connection) -> int:
    (count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return int(count)


def _row(entry: Entry) -> list[object]:
    values = asdict(entry)
    values["nll"] = [value if value == value and abs(value) != float("inf") else None for value in entry.nll]
    return [json.dumps(values[name]) if name in JSON_COLUMNS else values[name] for name in COLUMNS]


def _entry(row: Sequence[object], accepted: set[str]) -> Entry:
    values = dict(zip(COLUMNS, row, strict=True))
    for name in JSON_COLUMNS:
        values[name] = json.loads(str(values[name]))
    values["nll"] = numbers(values["nll"])
    values["passed"] = bool(values["passed"])
    return Entry(**values, accepted=values["run"] in accepted)  # type: ignore[arg-type]
