"""Secrets leave a trace; ordinary text stays as it is. Every secret here is made up, and put together at run time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from ingest_traces import answer as said
from ingest_traces import lines, prompt, taken, use

from composer_prime.traces.ingest.masking.masker import Masker
from composer_prime.traces.records import write_state

ALNUM = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0"
SECRETS = {
    "github-token": "ghp_" + ALNUM[:36],
    "api-key": "sk-ant-api03-" + ALNUM[:32],
    "aws-key": "AKIA" + "QRSTUVWXYZ234567",
    "slack-token": "xoxb-" + "123456789012-" + ALNUM[:24],
    "hugging-face-token": "hf_" + ALNUM[:34],
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + ALNUM,
    "google-api-key": "AIza" + ALNUM[:35],
    "gitlab-token": "glpat-" + ALNUM[:20],
    "stripe-key": "sk_live_" + ALNUM[:24],
    "email": "jane.doe@example.com",
    "twilio-key": "SK" + "3f78" * 8,
}
PREFIXED = [
    "npm_" + ALNUM[:36],
    "dop_v1_" + "3f786850" * 8,
    "hvs." + ALNUM,
    "nvapi-" + ALNUM + ALNUM[:24],
    "r8_" + ALNUM[:37],
    "pplx-" + ALNUM + ALNUM[:8],
    "dckr_pat_" + ALNUM[:27],
    "AGE-SECRET-KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" * 2,
    "xapp-1-A0123456-1234567890123-" + "3f" * 32,
    "sk_test_" + ALNUM[:24],
    "shpat_" + "3f78" * 8,
    "lin_api_" + ALNUM,
    "dapi" + "3f78" * 8,
    "tvly-" + ALNUM[:32],
    "1//0g" + ALNUM,
    "ATATT3xFfGF0" + ALNUM,
    "sbp_" + "3f786850" * 5,
    "sntrys_" + ALNUM + "_" + ALNUM,
    "PMAK-" + "3f78" * 6 + "-" + "3f" * 17,
    "figd_" + ALNUM,
    "sq0atp-" + ALNUM[:22],
    "ntn_" + ALNUM + "abcde6",
    "whsec_" + ALNUM[:32],
    "GOCSPX-" + ALNUM[:28],
    "glsa_" + ALNUM[:32] + "_3f786850",
    "pscale_tkn_" + ALNUM,
    "tskey-auth-" + ALNUM,
    "lsv2_pt_" + "3f78" * 8 + "_3f78685012",
    "shpat_" + "3F78" * 8,
    "abc1Q~" + ALNUM[:33],
    "fm2_" + ALNUM + ALNUM,
    "sk-proj-" + ALNUM + "_-" + ALNUM,
]
"""Of further providers."""


def masked(text: str) -> tuple[str, Counter[str]]:
    found: Counter[str] = Counter()
    return Masker(found).text(text), found


@pytest.mark.parametrize("kind", SECRETS)
def test_tokens_are_masked_and_counted(kind: str) -> None:
    text, found = masked(f"the value {SECRETS[kind]} was printed")
    assert SECRETS[kind] not in text and text.endswith("was printed")
    assert found == {kind: 1}


@pytest.mark.parametrize("token", PREFIXED)
def test_more_providers(token: str) -> None:
    assert masked(f"x {token} y") == ("x <masked:api-key> y", Counter({"api-key": 1}))


# Of what surrounds a secret, nothing is lost.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('password = "Tr0ub4dor&3x"', 'password = "<masked:password>"'),
        ("export DB_PASSWORD=hunter2hunter2 && run", "export DB_PASSWORD=<masked:password> && run"),
        ("curl -H 'Authorization: Bearer " + ALNUM + "' x", "curl -H 'Authorization: Bearer <masked:bearer-token>' x"),
        ("postgres://bob:s3cretpw@db/x", "postgres://bob:<masked:basic-auth>@db/x"),
        ("cd /home/jdoe/src && ls /Users/jdoe", "cd /home/user/src && ls /Users/user"),
        ("aws_secret_access_key = wJalrXUtnF7MD/bPxRfi9EK", "aws_secret_access_key = <masked:password>"),
        ("x-api-key: abcd1234efgh5678", "x-api-key: <masked:password>"),
        ("api_key: 3f786850e387550fdab836ed7e6dc881", "api_key: <masked:password>"),
        ('{\\"api_key\\": \\"3f786850e387550f\\"}', '{\\"api_key\\": \\"<masked:password>\\"}'),
        ("curl 'x?accessToken=abc123def456&n=1'", "curl 'x?accessToken=<masked:password>&n=1'"),
        ("API_KEY=12345678 PASSWORD=correct.horse", "API_KEY=<masked:password> PASSWORD=<masked:password>"),
        ("TOKEN=abc.def.ghi1", "TOKEN=<masked:password>"),
        ("TOKEN=abc123def456 run", "TOKEN=<masked:password> run"),
        ("GITHUB_TOKEN: abc123def456", "GITHUB_TOKEN: <masked:password>"),
        ("DB_PASS=hunter2 MYSQL_PWD=hunter2", "DB_PASS=<masked:password> MYSQL_PWD=<masked:password>"),
        ("Authorization: Basic dXNlcjpwdw==", "Authorization: Basic <masked:basic-auth>"),
        ("curl -s -u a:b http://b/a:b", "curl -s -u a:<masked:basic-auth> http://b/a:b"),
        ("redis://:pw@pw/0", "redis://:<masked:basic-auth>@pw/0"),
        ("got ya29." + ALNUM[:30] + " back", "got <masked:google-token> back"),
        ("ls ~/.claude/projects/-home-alice-src", "ls ~/.claude/projects/-home-user-src"),
        ("C:\\Users\\jdoe\\src", "C:\\Users\\user\\src"),
        ("C:\\Users\\Jane Doe\\src", "C:\\Users\\user\\src"),
        ("in C:\\Users\\jdoe and elsewhere", "in C:\\Users\\user and elsewhere"),
        ("ls /home/jürgen/x /home/j_doe", "ls /home/user/x /home/user"),
        ("mysql --password Tr0ub4dor3x9 db", "mysql --password <masked:password> db"),
        ("sshpass -p hunter2 ssh -p 22 h", "sshpass -p <masked:password> ssh -p 22 h"),
        ("sshpass -p'a b$c' scp x h:", "sshpass -p'<masked:password>' scp x h:"),
        ("mysql -u root -proot db -p", "mysql -u root -p<masked:password> db -p"),
        ("/usr/bin/mysqldump -p'se cret' db | gzip", "/usr/bin/mysqldump -p'<masked:password>' db | gzip"),
        ("docker exec db mariadb -pa1 -e 'x'", "docker exec db mariadb -p<masked:password> -e 'x'"),
        ("docker login -u bob -p hunter2 r.io", "docker login -u bob -p <masked:password> r.io"),
        ("redis-cli -h db -a hunter2 ping", "redis-cli -h db -a <masked:password> ping"),
        ("gh auth --token '3f786850e387550f' x", "gh auth --token '<masked:password>' x"),
        ("x --secret-access-key abc123def456", "x --secret-access-key <masked:password>"),
        ("login user password 3f786850e387550f", "login user password <masked:password>"),
        ("Cookie: a=b; session=3f786850e387", "Cookie: a=b; session=<masked:password>"),
        ("-H 'Cookie: s=3f786850e387' -d n=3f786850e387", "-H 'Cookie: s=<masked:password>' -d n=3f786850e387"),
        ("Set-Cookie: sid=3f786850e387; Domain=a1b2c3.io", "Set-Cookie: sid=<masked:password>; Domain=a1b2c3.io"),
        (
            "Set-Cookie: sid=3f786850e387; Path=/\nSet-Cookie: csrf=c0ffee123456\n",
            "Set-Cookie: sid=<masked:password>; Path=/\nSet-Cookie: csrf=<masked:password>\n",
        ),
        ("cookie jar\nCookie: sid=3f786850e387", "cookie jar\nCookie: sid=<masked:password>"),
        ("PGPASSWORD=hunter2 psql -h db", "PGPASSWORD=<masked:password> psql -h db"),
        ("export PGPASSWORD=correct-horse", "export PGPASSWORD=<masked:password>"),
        ("SSHPASS=hunter2 sshpass -e ssh h", "SSHPASS=<masked:password> sshpass -e ssh h"),
        (
            "REDISCLI_AUTH=hunter2 LDAP_BIND_PW=hunter2",
            "REDISCLI_AUTH=<masked:password> LDAP_BIND_PW=<masked:password>",
        ),
        ("GITHUB_PAT=abc123def456", "GITHUB_PAT=<masked:password>"),
        (
            "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzzKEY\n",
            "aws_secret_access_key = <masked:aws-key>\n",
        ),
        ("api_token: qWeRtYUIOpAsDfGHjKlZxCvB", "api_token: <masked:password>"),
        (
            "https://discord.com/api/webhooks/123456789012345678/" + ALNUM + ALNUM[:28],
            "https://discord.com/api/webhooks/123456789012345678/<masked:webhook>",
        ),
        (
            "https://api.telegram.org/bot123456789:AAF" + ALNUM[:32] + "/send",
            "https://api.telegram.org/bot<masked:telegram-token>/send",
        ),
        ("sk_live_" + ALNUM + ALNUM + " x", "<masked:stripe-key> x"),
        (SECRETS["jwt"] + " x", "<masked:jwt> x"),
        ("login=jane%40example.com&x", "login=<masked:email>&x"),
        ("Private-Lines: 2\n" + ALNUM + "\n" + ALNUM + "\nx", "Private-Lines: 2\n<masked:private-key>\nx"),
        ("x" + SECRETS["github-token"] + " x", "x<masked:github-token> x"),
        ("DB_PASSWORD=p\\@ssw0rd99 x", "DB_PASSWORD=<masked:password> x"),
        ("DB_PASSWORD='Domain\\s3cretpw' x", "DB_PASSWORD='<masked:password>' x"),
        ("x\\nPASSWORD=hunter2\\nx", "x\\nPASSWORD=<masked:password>\\nx"),
        ("PASSWORD=hunter2\\\\nx", "PASSWORD=<masked:password>\\\\nx"),
        ('password = "correct horse battery 9 staple"', 'password = "<masked:password>"'),
        ('password: "Summer 2024!"', 'password: "<masked:password>"'),
        ("password: 'open:sesame'", "password: '<masked:password>'"),
        ('"password": "hunter|two2:x"', '"password": "<masked:password>"'),
        ("postgres://u:{ecr3t99@h/db", "postgres://u:<masked:basic-auth>@h/db"),
        ("postgres://u:<ecr3t99@h/db", "postgres://u:<masked:basic-auth>@h/db"),
        ("send Basic dXNlcjpwYXNzdzByZA== back", "send Basic <masked:basic-auth> back"),
    ],
)
def test_only_the_secret_goes(text: str, expected: str) -> None:
    assert masked(text)[0] == expected


# A private key goes as a whole, not only its first line.
def test_private_keys_go_as_a_block() -> None:
    key = "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEabc\ndef\n-----END RSA PRIVATE " + "KEY-----"
    assert masked(f"before\n{key}\nafter")[0] == "before\n<masked:private-key>\nafter"


# An encrypted key has headers with dashes in them; of a key that was cut off, what is there goes.
@pytest.mark.parametrize("end", ["-----END RSA PRIVATE " + "KEY-----\nafter", ""])
def test_encrypted_private_keys_go_whole(end: str) -> None:
    head = "-----BEGIN RSA PRIVATE " + "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,3F17\n\n"
    assert masked(head + f"{ALNUM}\n{ALNUM}\n{end}")[0] == "<masked:private-key>" + ("\nafter" if end else "\n")


# What agents write all day is no secret: hashes, ids, code about passwords, clone addresses.
@pytest.mark.parametrize(
    "text",
    [
        "commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "def check(password: str) -> bool: return password == stored",
        'parser.add_argument("--password", help="the password")',
        "git clone git@github.com:org/repo.git",
        "api_key = os.environ['API_KEY']",
        "next_token = logits.argmax2(dim=-1)",
        "pad_token = tokenizer.eos_token",
        "max_tokens: 4096, token: 15043123, stop_token=50256",
        "def send(token: OAuth2Token, secret=key_v2.secret) -> str:",
        "private_key: ~/.ssh/id_ed25519",
        "PWD=/srv/app2/build15 OLDPWD=/srv/app2/x1y2z3",
        'TOKEN = re.compile(r"x1y2z3w4")',
        "if token == expected_token_12 and cache_key: sha256abc99",
        "PASS: tests/test_a1b2c3.py",
        "TOKEN=$GITHUB_TOKEN curl -u $USER:$PW http://host:8080",
        "docker run -u 1000:1000 image",
        "--home-dir x, --api-key=KEY",
        'if "-----BEGIN PRIVATE " in text: load(text)',
        "id 1af7fc5e-8455-4414-9ccd-011d40f70b2a",
        "run --password PASSWORD --token-file a1b2c3d4e5 --tokenizer x1y2z3w4v5 --max-token 40961234",
        "docker build --secret id=npm12rc34,src=a1b2c3 . && x --token $T1 --token <token12345>",
        "Basic authentication and Basic Configuration of npm_config_registry hvs.py dapi_client r8_x",
        "cookie = SimpleCookie(); cookies: theme=dark; Max-Age=31536000; sk_test_ prefix, the password reset2 page",
        "MAX_TOKEN=100000 EOS_TOKEN='151645' run, API_KEY=args.api_key, SECRET_KEY=settings.SECRET",
        "TOKEN=os.environ['X'], API_KEY=config.get('api'), ls -home-page --tool -home-dir",
        "mkdir -p login/foo && ssh -p 22 h && cp -p a b && docker run -p 80:80 -p8080:80 x",
        "docker run --name mysql -p3306:3306 -p127.0.0.1:33060:33060 mysql && mysql -u root -p db && mysql -P 3306 x",
        'sshpass -p $PW ssh h; sshpass -p <password> x; sshpass -e ssh -p 22 h; mysql -p"$PASS" x; mysql -p`cat f` x',
        "g++ -I/usr/include/mysql a.cpp -pthread $(mysql_config --libs) -pthread; redis-cli -p 6379; az login -p $P",
        "next_token 3f786850e387550f, a secret 3f786850e387550f",
        "arn:aws:sns:us-west-2:111111111111:Glacier-Notification-Topic-Of-An-Example",
        "apiKeyJson.loads.value publicKeyJwk.kty AGFzAKIAQRSTUVWXYZ234567QRST",
        'START = b"-----BEGIN OPENSSH PRIVATE ' + 'KEY-----"\nEND = b"-----END OPENSSH PRIVATE ' + 'KEY-----"\n',
        'class="sk-toggleable__label-arrow sk-estimator-doc-link"; use Bearer authentication-configuration here',
        'f"postgres://{user}:{password}@{host}/{db}", "http://%s:%s@%s/", https://<user>:<password>@host',
        "see APACHECONFIG or APPENDIXABC x, PublicKeyToken=b77a5c561934e089, PublicKeyToken='b77a5c561934e089'",
        "private_key: x25519.X25519PrivateKey, signing_key: ed25519.Ed25519PrivateKey, token: MY_LONG_ENVIRONMENT_NAME",
        "'password' => 'required|min:8|confirmed', 'secret_list' => 'encrypted:array', https://user:password@host/x",
        "secret_type = 'Base64 High Entropy String', prompt_password = 'npm password: '",
        "bad_password = 'It must have at least 8 characters, and 2 digits!', 'password': 'required|string|min:8'",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert masked(text) == (text, Counter())


# Masking goes through arguments and results as well, and --no-mask switches it off.
def test_masking_reaches_every_message(tmp_path: Path) -> None:
    token = SECRETS["github-token"]
    records = [
        prompt("u1", None, f"use {token}"),
        said("a1", "u1", use("t1", "Bash", command=f'echo "{token}"', env={"T": [token]})),
        prompt("u2", "a1", f"again {token}"),
        said("a2", "u2", {"type": "thinking", "thinking": token}, {"type": "text", "text": token}),
    ]
    path = lines(tmp_path / "s.jsonl", *records)
    states, tally = taken(path)
    assert token not in json.dumps([[*state.messages, state.student_action] for state in states])
    assert tally.masked == {"github-token": 6}
    assert token in json.dumps([state.messages for state in taken(path, mask=False)[0]])


# Keys that are masked alike keep their values, each under a name of its own.
def test_keys_that_are_masked_alike() -> None:
    value = {"a@example.com": 1, "b@example.com": 2, "<masked:email> 2": 3, "c@example.com": {"d@example.com": 4}}
    masked_value = Masker(Counter()).value(value)
    assert list(masked_value.values()) == [1, 2, 3, {"<masked:email>": 4}] and "example" not in str(masked_value)


# Tools, the name of the trace and the model's come from the file too.
def test_masking_reaches_what_surrounds_the_messages(tmp_path: Path) -> None:
    token = SECRETS["github-token"]
    tool = {"type": "function", "function": {"name": "cat", "description": f"uses {token}", "parameters": {}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    record = {"messages": messages, "tools": [tool], "id": f"-home-jdoe-{token}", "model": f"/home/jdoe/{token}"}
    states, _ = taken(lines(tmp_path / "m.jsonl", record))
    assert states and all(text not in write_state(states[0]).decode() for text in (token, "jdoe"))


HOSTILE = [
    "secret", "password=", "secret-", 'password="', "password=`x", "`", "eyJ", "=eyJ", "xsk-", "//", "//:_authToken=",
    "authorization: ", "curl -u ", "://a:", " a@", "a@a.", "/home/", "-----BEGIN PRIVATE " + "KEY-----", "api_key\\",
    "token: ", "--token ", "-a", "cookie: ", "cookie: a=", "cookie=b;", "cookie: a=b\n", "cookie\\", "password ",
    "Basic ", "npm_", "1//0", "C:\\Users\\a b ", "secret==", "'a' == secret", "xoxa-1-", "aws", "-home-",
    "TOKEN=a.", "TOKEN=1", "mysql ", "/mysql -p", "sshpass -p", "docker login ", "redis-cli -a ",
    "/home/a", "/home/-", "%2Fhome%2F", "a%40b.", "sk-a", "Bearer a", "secret_access_key=", "Private-Lines: 1\n",
    "-----BEGIN PRIVATE " + "KEY-----\n" + "A" * 64, "Proc-Type: ", "aA", "token: aA1!", "123456789:", "M.", "Q~",
    "s#/home/a", "[A]/home/a", "x/overlay2/a/diff/home/a", "diff --git a/home/a b",
    "PASSWORD=\\", "PASSWORD=\\\\n", 'password="min|',
    "../", "../../home/a", "-rw-r--r-- 1 a a 1\n", "-rw-r--r-- 1 a" + " " * 60, "drwxr-xr-x",
    "----BEGIN PRIVATE " + "KEY----" + "A" * 40 + "!", "----BEGIN PRIVATE " + "KEY----!?",
]  # fmt: skip


# Time is linear in the length, whatever a text repeats: quadratic work on this length would take minutes.
@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_text_ends(unit: str) -> None:
    text, _ = masked(unit * (250_000 // len(unit)) + " T3BlbkFJ _authToken @ aws secret '" + " /home/ 8Q~")
    assert text.rstrip("'").endswith("8Q~") or "<masked:" in text


# A secret far into a line of megabytes is found, for lines are not read in pieces.
def test_a_secret_in_a_long_line() -> None:
    text, found = masked("x = 1; " * 100_000 + 'password = "Tr0ub4dor&3x"; ' + "y = 2; " * 100_000)
    assert "Tr0ub4dor" not in text and found == {"password": 1}
