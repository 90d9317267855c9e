//! Downloads from a Hub that runs in the test.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn_flex::Flex;
use burn_moe::Error;
use burn_moe::checkpoint::hub::{HubOptions, locate, resolve};
use burn_moe::checkpoint::{CheckpointSource, LoadOptions, load};

use super::toy::*;

const TOKEN: &str = "hf_secret";

/// A repository by revision: the commit and its files.
#[derive(Clone, Default)]
struct Hub {
    commits: BTreeMap<String, (String, BTreeMap<String, Vec<u8>>)>,
    /// Answers 401 without the token.
    gated: bool,
}

struct Server {
    address: String,
    hub: Arc<Mutex<Hub>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(hub: Hub) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (hub, requests) = (Arc::new(Mutex::new(hub)), Arc::new(Mutex::new(Vec::new())));
        let (shared, log) = (hub.clone(), requests.clone());
        // The thread ends with the test process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = answer(stream, &shared.lock().unwrap().clone(), &log);
            }
        });
        Self { address, hub, requests }
    }

    fn options(&self, cache: &Path) -> HubOptions {
        HubOptions {
            cache_dir: Some(cache.to_path_buf()),
            endpoint: Some(self.address.clone()),
            offline: Some(false),
            ..HubOptions::default()
        }
    }

    /// Requests since the last call.
    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

fn answer(mut stream: TcpStream, hub: &Hub, log: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let path = lines
        .next()
        .transpose()?
        .unwrap_or_default()
        .split(' ')
        .nth(1)
        .unwrap_or_default()
        .to_string();
    let mut headers = BTreeMap::new();
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        if let Some((key, value)) = line.split_once(": ") {
            headers.insert(key.to_ascii_lowercase(), value.to_string());
        }
    }
    log.lock().unwrap().push(path.clone());
    let mut send = |status: &str, extra: &str, body: &[u8]| {
        write!(
            stream,
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n{extra}\r\n",
            body.len()
        )?;
        stream.write_all(body)
    };
    if hub.gated && headers.get("authorization") != Some(&format!("Bearer {TOKEN}")) {
        return send("401 Unauthorized", "", b"");
    }
    let by_commit = |sha: &str| hub.commits.values().find(|(commit, _)| commit == sha);
    if let Some(revision) = path.strip_prefix("/api/models/org/name/revision/") {
        let revision = revision.replace("%2F", "/");
        let Some((sha, files)) = hub.commits.get(&revision).or_else(|| by_commit(&revision)) else {
            return send("404 Not Found", "", b"");
        };
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let body = serde_json::json!({"sha": sha, "siblings": siblings}).to_string();
        return send("200 OK", "Content-Type: application/json\r\n", body.as_bytes());
    }
    let file = path.strip_prefix("/org/name/resolve/").and_then(|rest| rest.split_once('/'));
    let found = file.and_then(|(sha, name)| Some((sha, name, by_commit(sha)?.1.get(name)?)));
    let Some((sha, name, bytes)) = found else {
        return send("404 Not Found", "", b"");
    };
    let etag = name.replace('/', "-");
    let range = headers.get("range").and_then(|r| r.strip_prefix("bytes=")?.split_once('-'));
    let (start, end) = match range {
        Some((start, end)) => (
            start.parse().unwrap_or(0),
            end.parse::<usize>().map_or(bytes.len(), |e| (e + 1).min(bytes.len())),
        ),
        None => (0, bytes.len()),
    };
    let extra = format!(
        "ETag: \"{sha}-{etag}\"\r\nX-Repo-Commit: {sha}\r\nContent-Range: bytes {start}-{}/{}\r\n",
        end.saturating_sub(1),
        bytes.len()
    );
    send("206 Partial Content", &extra, &bytes[start.min(end)..end])
}

/// Files of a checkpoint of two shards.
fn files(base: &str) -> BTreeMap<String, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    write_shards(dir.path(), &folder(base), 2, |i, _| i % 2);
    let mut files: BTreeMap<String, Vec<u8>> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            (
                path.file_name().unwrap().to_str().unwrap().to_string(),
                std::fs::read(&path).unwrap(),
            )
        })
        .collect();
    files.insert("tokenizer.json".into(), b"{}".to_vec());
    files.insert("chat_templates/tools.jinja".into(), b"tools".to_vec());
    files.insert("README.md".into(), b"not needed".to_vec());
    files.insert("original/consolidated.pth".into(), b"not needed".to_vec());
    files
}

fn hub() -> Hub {
    let commit = |c: char, base: &str| (c.to_string().repeat(40), files(base));
    Hub {
        commits: [
            ("main".into(), commit('a', "model.")),
            ("refs/pr/1".into(), commit('b', "backbone.")),
        ]
        .into(),
        gated: false,
    }
}

#[test]
fn a_repository_becomes_a_folder_that_loads() {
    let (server, cache) = (Server::start(hub()), tempfile::tempdir().unwrap());
    let dir = resolve("org/name", &server.options(cache.path())).unwrap();
    assert!(
        dir.ends_with(format!("models--org--name/snapshots/{}", "a".repeat(40))),
        "{}",
        dir.display()
    );
    assert_eq!(read(&dir), folder("model."));
    assert_eq!(std::fs::read(dir.join("chat_templates/tools.jinja")).unwrap(), b"tools");
    assert!(!dir.join("README.md").exists() && !dir.join("original").exists());
    let source = CheckpointSource::open(&dir).unwrap();
    load(
        Toy::<Flex>::new(false, E, &Default::default()),
        &source,
        &map(),
        &LoadOptions::default(),
    )
    .unwrap();
    // The second time only the commit is asked for.
    server.requests();
    assert_eq!(resolve("org/name", &server.options(cache.path())).unwrap(), dir);
    assert_eq!(server.requests(), ["/api/models/org/name/revision/main"]);
}

#[test]
fn a_revision_is_its_own_snapshot_and_main_may_move() {
    let (server, cache) = (Server::start(hub()), tempfile::tempdir().unwrap());
    let options = HubOptions {
        revision: Some("refs/pr/1".into()),
        ..server.options(cache.path())
    };
    let dir = resolve("org/name", &options).unwrap();
    assert!(dir.ends_with("b".repeat(40)));
    assert!(read(&dir).contains_key("backbone.norm.weight"));
    let main = resolve("org/name", &server.options(cache.path())).unwrap();
    assert!(main.ends_with("a".repeat(40)));
    server
        .hub
        .lock()
        .unwrap()
        .commits
        .insert("main".into(), ("c".repeat(40), files("model.")));
    assert!(
        resolve("org/name", &server.options(cache.path()))
            .unwrap()
            .ends_with("c".repeat(40))
    );
}

#[test]
fn the_token_is_sent_and_its_absence_explained() {
    let server = Server::start(Hub { gated: true, ..hub() });
    let cache = tempfile::tempdir().unwrap();
    let cache = cache.path().join("hub");
    let error = resolve("org/name", &server.options(&cache)).unwrap_err();
    assert!(
        matches!(error, Error::Hub { .. }) && error.to_string().contains("HF_TOKEN"),
        "{error}"
    );
    let options = HubOptions {
        token: Some(TOKEN.into()),
        ..server.options(&cache)
    };
    resolve("org/name", &options).unwrap();
}

#[test]
fn what_is_missing_is_named() {
    let cases = [
        ("part-1.safetensors", "part-1.safetensors: no such repository, revision or file"),
        ("config.json", "no config.json in the repository"),
        (
            "model.safetensors.index.json",
            "no model.safetensors and no model.safetensors.index.json",
        ),
    ];
    for (file, expected) in cases {
        let mut hub = hub();
        hub.commits.get_mut("main").unwrap().1.remove(file);
        let (server, cache) = (Server::start(hub), tempfile::tempdir().unwrap());
        let error = resolve("org/name", &server.options(cache.path())).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(expected) && text.contains("org/name@main"), "{text}");
        // Half a snapshot is not a snapshot.
        let offline = HubOptions {
            offline: Some(true),
            ..server.options(cache.path())
        };
        assert!(resolve("org/name", &offline).unwrap_err().to_string().contains("no snapshot in"));
    }
    let (server, cache) = (Server::start(hub()), tempfile::tempdir().unwrap());
    let options = HubOptions {
        revision: Some("v9".into()),
        ..server.options(cache.path())
    };
    let text = resolve("org/name", &options).unwrap_err().to_string();
    assert!(
        text.contains("org/name@v9") && text.contains("no such repository, revision or file"),
        "{text}"
    );
}

#[test]
fn offline_uses_the_cache_and_nothing_else() {
    let (server, cache) = (Server::start(hub()), tempfile::tempdir().unwrap());
    let offline = HubOptions {
        offline: Some(true),
        ..server.options(cache.path())
    };
    let error = resolve("org/name", &offline).unwrap_err();
    assert!(error.to_string().contains("offline, and no snapshot in"), "{error}");
    assert!(server.requests().is_empty());
    let dir = resolve("org/name", &server.options(cache.path())).unwrap();
    server.requests();
    assert_eq!(resolve("org/name", &offline).unwrap(), dir);
    let commit = HubOptions {
        revision: Some("a".repeat(40)),
        ..offline.clone()
    };
    assert_eq!(resolve("org/name", &commit).unwrap(), dir);
    assert!(server.requests().is_empty());
    // Without a connection the cache serves as well.
    let unreachable = HubOptions {
        endpoint: Some("http://127.0.0.1:1".into()),
        ..server.options(cache.path())
    };
    assert_eq!(resolve("org/name", &unreachable).unwrap(), dir);
    let empty = tempfile::tempdir().unwrap();
    let nothing = HubOptions {
        cache_dir: Some(empty.path().to_path_buf()),
        ..unreachable
    };
    assert!(matches!(resolve("org/name", &nothing).unwrap_err(), Error::Hub { .. }));
    // A shard that was deleted from the cache is named.
    std::fs::remove_file(dir.join("part-0.safetensors")).unwrap();
    assert!(
        resolve("org/name", &offline)
            .unwrap_err()
            .to_string()
            .contains("part-0.safetensors")
    );
}

#[test]
fn a_folder_is_its_own_location() {
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().to_str().unwrap();
    assert_eq!(locate(name, &HubOptions::default()).unwrap(), dir.path());
    let error = locate("./no/such/folder", &HubOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("neither a local folder nor the form org/name"),
        "{error}"
    );
}
