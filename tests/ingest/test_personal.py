"""E-mail addresses and owners of home folders leave a trace; code that looks like them stays. Every name is made up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.traces.ingest.masking.masker import Masker


def masked(text: str) -> tuple[str, Counter[str]]:
    found: Counter[str] = Counter()
    return Masker(found).text(text), found


# Code, packages, units, routes and files inside a project look like them, and stay.
@pytest.mark.parametrize(
    "text",
    [
        "cat src/app/home/home.component.ts src/app/home/home.component.html pages/Users/List.tsx a/home/b.py",
        "templates/home/index.html, /home/index.html, '/Users/List.tsx', ~/home/x, ../home/x, @/home/views, #/home/x",
        "from 'app/home/views'; ${ROOT}/home/x; $(pwd)/home/x; ls /home/ /home/... /home/linuxbrew/.linuxbrew",
        "https://example.com/home/about http://home/about localhost:3000/home/about",
        "return redirect('/home/dashboard'); <a href=\"/home/about\"> <Link to='/home/x'> client.get('/home/list')",
        "GET /Users/2819c223 HTTP/1.1",
        "--- a/home/templates/x.html\n+++ b/home/templates/x.html\n--- a/home/views.py",
        "diff --git a/home/migrations/0001.py b/home/migrations/0001.py\ndiff --git a/home/urls.py b/home/urls.py",
        "/repo/src/app/home/home.component.ts templates/home/index.html /repo/home/jobs/x /mnt/repo/home/views/x.py",
        "app/[locale]/home/page/x.tsx import '@/home/list/x' https://h/data/home/list/x fetch('/data/home/list')",
        "https://h/a#/home/list/x docs#/home/list/x data/home/list/x",
        "assets/logo@2x.png icon@3x.webp 'logo@2x.png'",
        "att = (q@k.transpose(-2, -1)); y = x@self.weight + a@b.to(device) + x@w.mt[0] + x@w.data.shape",
        "systemctl restart openvpn@server.service getty@tty1.service",
        "npm i foo@1.2.3-beta.rc vue@3.4.0-alpha.dev; uses: actions/checkout@main.yml",
        "import x from '../../home/list/x'; require('../../Users/list/x'); @import \"../../home/list/x\";",
        "see ../../home/components/x ../../Users/List.tsx a/../../home/list/x ../home/list/x",
        "-rw-r--r-- 1 root root 12 Jan 1 x\ndrwxr-xr-x 2 1000 1000 4096 Jan 1 x\nchmod rwxr-xr-x 1 jdoe 12",
        "git@github.com:org/repo.git, ssh root@db.example.com, scp x ubuntu@build.example.com:",
    ],
)
def test_code_stays(text: str) -> None:
    assert masked(text) == (text, Counter())


# Addresses are found wherever they stand; of a URL's user the host stays.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Jane <jane.doe+x@example.co.uk>, a@b.engineering.", "Jane <<masked:email>>, <masked:email>."),
        ("ssh jane@build.corp.local; jane@163.com(work)", "ssh <masked:email>; <masked:email>(work)"),
        ("x\\njane@example.com\\ngit@github.com:a/b", "x\\n<masked:email>\\ngit@github.com:a/b"),
        ("alice@example.com.Then bob@gmail.com.json", "<masked:email>.Then <masked:email>.json"),
        ("alice@firma.de(office), bob@uni.de[1]", "<masked:email>(office), <masked:email>[1]"),
        ("alice@box.localdomain bob@corp.intranet c@nas.home", "<masked:email> <masked:email> <masked:email>"),
        ("alice@dc.private bob@hpc.cluster carol@self.de", "<masked:email> <masked:email> <masked:email>"),
        (
            "\x1b[K\x1b[1;32mjane@example.com x\\u0027jane@example.com",
            "\x1b[K\x1b[1;32m<masked:email> x\\u0027<masked:email>",
        ),
        ("https://jane@host.example.com/x", "https://<masked:email>@host.example.com/x"),
    ],
)
def test_addresses_are_masked(text: str, expected: str) -> None:
    assert masked(text)[0] == expected


# However a path is written, its owner goes and nothing else.
@pytest.mark.parametrize(
    "text",
    [
        "cd /home/NAME/src && ls /Users/NAME/x.py",
        "PATH=/usr/bin:/home/NAME/bin open('/home/NAME/x.txt') cat >/home/NAME/x",
        '{"cwd":"/home/NAME/src","file":"file:///Users/NAME/x"}',
        "\\/home\\/NAME\\/x out\\n/home/NAME/x path=%2FUsers%2FNAME%2Fx",
        "/mnt/c/Users/NAME/x /c/Users/NAME/x /var/home/NAME/x host:/home/NAME/x C:/Users/NAME/x",
        "cc -I/home/NAME/include -L/Users/NAME/lib",
        "\x1b[32m/home/NAME/src\x1b[0m",
        "C:\\Users\\NAME\\src D:\\\\Users\\\\NAME\\\\src ~/.claude/projects/-Users-NAME-src",
        "x:1000:1000::/home/NAME:/bin/sh",
        "in /home/NAME. And in /Users/NAME, too",
        "curl -d @/home/NAME/p.json --data-binary '@/home/NAME/x' -F f=@/home/NAME/x h",
        "\x1b[35m\x1b[K/home/NAME/f [INFO]/home/NAME s#/home/NAME#x# s@/srv@/home/NAME@",
        "/data/home/NAME /gpfs/home/NAME/x /cluster/home/NAME /nas/home/NAME /private/home/NAME /rootfs/home/NAME/x",
        "/chroot/home/NAME /mnt/disk/home/NAME/x /Volumes/X/Users/NAME /media/a/usb/home/NAME /proc/1/root/home/NAME/x",
        "/var/lib/docker/overlay2/0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f9/merged/home/NAME/x",
        "--- a/home/NAME/x\n+++ b/home/NAME/x\ndiff --git a/home/NAME/x.py b/home/NAME/x.py",
        "cd ../../Users/NAME/x && ls ../../../home/NAME/src '../../../../Users/NAME/y' -I../../home/NAME/x",
        "sftp://h/home/NAME ssh://u@h/home/NAME/x git+ssh://h/home/NAME/x vscode://file/home/NAME/x",
    ],
)
@pytest.mark.parametrize("name", ["jdoe", "j_doe2", "jürgen", "user2"])
def test_owners_are_masked(text: str, name: str) -> None:
    assert masked(text.replace("NAME", name))[0] == text.replace("NAME", "user")


# A long listing names the owner of each file, on Linux and macOS, also in escaped text. Other columns stay.
@pytest.mark.parametrize(
    "text",
    [
        "total 8\ndrwxr-xr-x  2 NAME NAME 4096 Jan  1 12:00 .\n-rw-r--r--  1 NAME docker   12 Jan  1 12:00 a NAME",
        "-rw-r--r--@  1 NAME  staff   384 Jan  1 12:00 a.py\nlrwxrwxrwt. 1 NAME staff 4 Jan 1 12:00 b -> a",
        "total 8\\ndrwxr-xr-x 2 NAME NAME 4096 Jan 1 .\\n-rwsr-x--- 1 NAME NAME 4096 Jan 1 x",
        "    drwxr-xr-x 2 NAME NAME 4096 Jan 1 .\n\t-rw-r--r-- 1 NAME NAME 4096 Jan 1 x",
    ],
)
def test_owners_of_files_are_masked(text: str) -> None:
    written = text.replace("NAME", "jdoe")
    expected = text.replace(" a NAME", " a jdoe").replace("NAME", "user")
    found = masked(written)
    assert found[0] == expected and found[1].total() == found[1]["file-owner"] > 1


# Names with dots and dashes go whole, as long as they are no files.
def test_names_with_dots() -> None:
    assert masked("/home/jane.doe/x /home/jane-doe /Users/user.b/y")[0] == "/home/user/x /home/user /Users/user/y"


PATH = st.lists(st.sampled_from(["src", "home", "Users", "app", "a-b", "x.py", "index.html", "v1.2"]), min_size=1)


# Different paths of a project stay different and whole; those of a home folder lose its owner alone.
@given(PATH, PATH)
def test_files_stay_different(first: list[str], second: list[str]) -> None:
    inside, other = "/repo/" + "/".join(first), "/repo/" + "/".join(second)
    assert masked(inside)[0] == inside and masked(other)[0] == other
    assert masked(f"/home/jdoe{inside}")[0] == f"/home/user{inside}"
