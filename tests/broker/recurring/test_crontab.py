"""Crontab files: entries with and without users, in the forms that packages of Debian install."""

from __future__ import annotations

import pytest

from timeball.broker.recurring.crontab import CrontabEntry, read_crontab
from timeball.model.errors import InvalidDelay

ZONE = "Europe/Berlin"


def cron(text: str, zone: str = ZONE) -> dict[str, object]:
    return {"cron": text, "zone": zone}


def program_of(entry: CrontabEntry) -> str:
    """Return an entry's name without the hash of its command."""
    program, _, digits = entry.name.rpartition("-")
    assert len(digits) == 6
    return program


@pytest.mark.parametrize(
    ("line", "name", "spec"),
    [
        # As in /etc/crontab.
        ("17 *\t* * *\troot\tcd / && run-parts --report /etc/cron.hourly", "cron-hourly", "17 * * * *"),
        (
            "25 6\t* * *\troot\ttest -x /usr/sbin/anacron || { cd / && run-parts /etc/cron.daily; }",
            "anacron",
            "25 6 * * *",
        ),
        ("47 6\t* * 7\troot\ttest -x /usr/sbin/anacron || true", "anacron", "47 6 * * 7"),
        ("52 6\t1 * *\troot\ttest -x /usr/sbin/anacron || true", "anacron", "52 6 1 * *"),
        # As in /etc/cron.d: a job for sessions, statistics, certificates, a check of disks.
        (
            "09,39 *     * * *     root   [ -x /usr/lib/app/clean ] && /usr/lib/app/clean",
            "clean",
            "09,39 * * * *",
        ),
        ("5-55/10 * * * * root command -v stats-1 > /dev/null && stats-1 1 1", "stats-1", "5-55/10 * * * *"),
        ("59 23 * * * root command -v stats-1 > /dev/null && stats-1 60 2", "stats-1", "59 23 * * *"),
        (
            "0 */12 * * * root test -x /usr/bin/renew -a \\! -d /run/systemd/system && renew -q",
            "renew",
            "0 */12 * * *",
        ),
        (
            "57 0 * * 0 root if [ -x /usr/lib/check ] && [ $(date +\\%d) -le 7 ]; then check; fi",
            "check",
            "57 0 * * 0",
        ),
        (
            "30 3 * * 0 root test -e /run/systemd/system || SERVICE_MODE=1 /usr/lib/fs/scrub_all",
            "scrub_all",
            "30 3 * * 0",
        ),
        ("10 3 * * * root test -e /run/systemd/system || /sbin/scrub_all -A -r", "scrub_all", "10 3 * * *"),
        ("*/5 * * * * www-data /usr/bin/php /srv/wiki/cron.php --quiet", "php", "*/5 * * * *"),
        ("0 8,20 * * mon-fri backup nice backup-all", "backup-all", "0 8,20 * * MON-FRI"),
        ("@daily logcheck [ -x /usr/sbin/logcheck ] && nice -n10 /usr/sbin/logcheck", "logcheck", "@daily"),
    ],
)
def test_an_entry_with_a_user_becomes_a_rule_named_after_its_program(line: str, name: str, spec: str) -> None:
    (entry,) = read_crontab(line, ZONE, has_user=True)
    assert (program_of(entry), entry.spec, entry.note) == (name, cron(spec), "")
    assert entry.command and "root" not in entry.command


USERS = """
# m h  dom mon dow   command
SHELL=/bin/bash
MAILTO = "me@example.com"

0 5 * * 1 tar -zcf /var/backups/home.tgz /home/
  @hourly fetch-mail
0 5 * * 2 tar -zcf /var/backups/etc.tgz /etc/
CRON_TZ=America/New_York
30 9 1 * * echo "month \\%" | mail -s Report me%Dear me,%all is well
"""


def test_a_user_file_is_read_without_comments_and_with_its_zone() -> None:
    assert read_crontab(USERS, ZONE) == [
        CrontabEntry("tar-f797ab", cron("0 5 * * 1"), "tar -zcf /var/backups/home.tgz /home/", ""),
        CrontabEntry("fetch-mail-1b8b44", cron("@hourly"), "fetch-mail", ""),
        CrontabEntry("tar-aba93f", cron("0 5 * * 2"), "tar -zcf /var/backups/etc.tgz /etc/", ""),
        CrontabEntry(
            "echo-dae30f",
            cron("30 9 1 * *", "America/New_York"),
            'echo "month %" | mail -s Report me',
            "cron passes the text after % to the command as its input",
        ),
    ]


@pytest.mark.parametrize(
    ("line", "command", "note"),
    [
        ("@reboot start-app", "start-app", "line 1: cron='@reboot': "),
        ("5/20 * * * * app", "app", "write 5-59/20"),
        ("0 0 */2 * 1 app", "app", "list the days"),
        ("0~59 3 * * * app", "app", "is not understood"),
        ("0 9 * * *", "", "line 1: an entry has five fields or a name such as @daily, and a command"),
        ("@daily", "", "and a command"),
    ],
)
def test_the_note_of_a_refused_entry_has_the_reason(line: str, command: str, note: str) -> None:
    (entry,) = read_crontab(line, ZONE)
    assert entry.spec is None and entry.command == command
    assert note in entry.note


def test_an_entry_without_a_program_is_named_after_its_line() -> None:
    (entry,) = read_crontab("0 9 * * * %input", ZONE)
    assert (entry.name, entry.spec, entry.command) == ("line-1", cron("0 9 * * *"), "")


def test_equal_commands_are_numbered() -> None:
    entries = read_crontab("0 1 * * * app\n0 2 * * * app\n0 3 * * * app\n", ZONE)
    assert [entry.name for entry in entries] == ["app-a172ce", "app-a172ce-2", "app-a172ce-3"]


def test_an_entry_keeps_its_name_when_others_change() -> None:
    """Otherwise the next import would give the schedule of a removed entry to another command."""
    first, second = read_crontab("0 1 * * * app --clean\n0 2 * * * app --report\n", ZONE)
    (moved,) = read_crontab("30 4 * * * app --report\n", ZONE)
    assert moved.name == second.name != first.name


def test_an_unknown_zone_is_refused() -> None:
    with pytest.raises(InvalidDelay, match="write it as Europe/Berlin"):
        read_crontab("", "CEST")
    (entry,) = read_crontab("CRON_TZ=CEST\n0 9 * * * app", ZONE)
    assert entry.spec is None and "no time zone" in entry.note
