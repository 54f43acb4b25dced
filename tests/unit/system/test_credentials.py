"""What is a credential, by its name or form, and what only looks like one."""

import pytest

from slime_like.system.credentials import is_credential, without_credentials


@pytest.mark.parametrize(
    "text",
    [
        "PGPASSWORD=123456", "{DB_PASSWORD: 12345678, X: 1}", "WANDB_API_KEY=12345678901234567890", "api_key=true-hid",
        "{'X-Auth': 'hid'}", "cookie=hid", "'Authorization': 'hid x'", "passphrase=hid", "AWS_ACCESS_KEY_ID=hid",
        "secret_key_base=hid", 'api_keys=["a","hid"]', "--password 'a hid'", "password=se,hid", "bearer hid",
        "nvapi-abcdefghijklmnop", "--sglang-api-key hid", "env={A: {HF_TOKEN: hid, B: 1}}", 'env="API_KEY=hid"',
        "apiKey: hid", "MYSQL_PWD=hid", "hfToken=hid", "APIKEY=hid", "http://u:hid@h/x", r'{\"api_key\": \"hid\"}',
        "x=0123456789012345678901234567890123456789", "--wandb-key=hid", "wandb_key: hid",
        "+judge.hftoken=hid", "special_token=hid", "a.wandbkey=hid", "apitoken=hid", "HF_TOKEN=/hid",
        "HF_TOKEN_2=hid",
        "DB_PASS=hid", "jwt=hid", "PASSWORD+=hid", "os.environ['API_KEY'] = 'hid'", 'password="a\\"hid"',
        "gsk_0123456789abcdef", "TOKEN=123456", "pwd=hid", "Authorization: Token hid", "auth=Bearer hid",
    ],
)  # fmt: skip
def test_a_credential_is_not_printed(text: str) -> None:
    shown = without_credentials("", text)
    assert "..." in shown and "hid" not in shown and "12345" not in shown and "abcdef" not in shown


@pytest.mark.parametrize(
    "text",
    [
        "monkey=banana", "turkey: x", "pad_token=<pad>", "eos_token: </s>", "max_tokens=512", "num_tokens: 16777216",
        "prompt_key=question", "sort_keys=1", "author=me", "pwd=/x", "OLDPWD=/y", "bypass_warmup=1", "key=none",
        "question_key=q", "stop_token=</s>", "use_auth=false",
        "/cache/hub/models--Qwen--Qwen2.5-7B/snapshots/a09a35458c702b33eeacc393d103063234e8bc28",
        "snapshots/a09a35458c702b33eeacc393d103063234e8bc28/train.parquet", "--max-tokens-per-gpu 9216", "tokenizer=/x",
    ],
)  # fmt: skip
def test_what_is_no_credential_stays(text: str) -> None:
    assert without_credentials("", text) == text


def test_names_of_headers_and_queries() -> None:
    credentials = (
        "X-Api-Key",
        "api_key",
        "key",
        "Authorization",
        "X-Auth-Token",
        "apiKey",
        "access_token",
        "db_pwd",
        "pwd",
    )
    others = "sort_keys", "keys", "X-Keys", "author", "answer_key", "max_tokens", "sort_key"
    assert all(map(is_credential, credentials)) and not any(map(is_credential, others))
