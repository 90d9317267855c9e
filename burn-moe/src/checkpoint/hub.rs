//! Checkpoints of the Hugging Face Hub: from `org/name` to a local snapshot folder, in the cache that other Hub clients share.
//!
//! A snapshot is looked up by the commit that the revision points to, and the revision is recorded only after its last file
//! has arrived, so that offline use never sees half a snapshot.

use std::path::{Component, Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use super::files::is_side_file;
use super::index::{self, INDEX_FILE, SINGLE_FILE};
use super::json::ConfigJson;
use crate::error::{Error, Result};

const CONFIG_FILE: &str = "config.json";
const DEFAULT_REVISION: &str = "main";

/// Where and how to get a repository. What is None comes from the environment variables that Hub clients use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HubOptions {
    /// Branch, tag or commit; None: `main`.
    pub revision: Option<String>,
    /// Access token; None: `HF_TOKEN`, or the token file beside the cache.
    pub token: Option<String>,
    /// Cache folder; None: `HF_HUB_CACHE`, `$HF_HOME/hub`, or `~/.cache/huggingface/hub`.
    pub cache_dir: Option<PathBuf>,
    /// Use the cache only; None: `HF_HUB_OFFLINE`.
    pub offline: Option<bool>,
    /// Address of the Hub; None: `HF_ENDPOINT`, or the public one.
    pub endpoint: Option<String>,
    /// Show a progress bar per file when stderr is a terminal.
    pub progress: bool,
}

/// The local folder of a model: `name` itself if that is a folder, else the snapshot of the Hub repository `org/name`.
///
/// Errors: those of [`resolve`]; a revision of a local folder is [`Error::Config`]; a name that is neither a folder nor looks like a repository is [`Error::Hub`].
pub fn locate(name: &str, options: &HubOptions) -> Result<PathBuf> {
    if Path::new(name).is_dir() {
        if let Some(revision) = &options.revision {
            let expected = format!("none, because {name} is a local folder");
            return Err(Error::config("revision", revision, expected));
        }
        return Ok(PathBuf::from(name));
    }
    resolve(name, options).map_err(|error| match error {
        Error::Hub { repo, revision, why } => Error::Hub {
            repo,
            revision,
            why: format!("no local folder has this name, and on the Hub: {why}"),
        },
        other => other,
    })
}

/// Local snapshot folder of the Hub repository `org/name`, downloading what the cache lacks: config, weights (the single file,
/// or the index and its shards), tokenizer, chat template and generation config.
///
/// Without a connection a complete snapshot of the cache is used. Errors are [`Error::Hub`] and name repository, revision,
/// and the file or setting.
pub fn resolve(repo: &str, options: &HubOptions) -> Result<PathBuf> {
    let settings = Settings::new(repo, options, |name| std::env::var(name).ok())?;
    if settings.offline {
        return settings.cached();
    }
    match settings.download() {
        Err(Failure::Unreachable(why)) => settings
            .cached()
            .inspect(|dir| {
                tracing::warn!("{repo}: {why}; using the snapshot {}", dir.display());
            })
            .map_err(|_| settings.error(why)),
        Err(Failure::Final(error)) => Err(error),
        Ok(dir) => Ok(dir),
    }
}

enum Failure {
    /// No answer at all: the cache may help.
    Unreachable(String),
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

#[derive(Debug)]
struct Settings {
    repo: String,
    revision: String,
    token: Option<String>,
    cache: Cache,
    offline: bool,
    endpoint: Option<String>,
    progress: bool,
}

impl Settings {
    fn new(repo: &str, options: &HubOptions, env: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let env = |name: &str| env(name).filter(|value| !value.is_empty());
        let revision = options.revision.clone().unwrap_or_else(|| DEFAULT_REVISION.into());
        let bad = |why: String| Error::Hub {
            repo: repo.to_string(),
            revision: revision.clone(),
            why,
        };
        let parts: Vec<&str> = repo.split('/').collect();
        let plain = |part: &&str| {
            !part.is_empty() && !part.starts_with('.') && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        if parts.len() > 2 || !parts.iter().all(plain) {
            return Err(bad("found neither a local folder nor the form org/name".into()));
        }
        let inside = Path::new(&revision).components().all(|c| matches!(c, Component::Normal(_)));
        if revision.is_empty() || !inside || !revision.bytes().all(|b| b.is_ascii_graphic() && !b"\\?#%".contains(&b)) {
            return Err(bad("expected a branch, tag or commit as revision".into()));
        }
        let home = || {
            env("HOME")
                .or_else(|| env("USERPROFILE"))
                .map(|home| PathBuf::from(home).join(".cache/huggingface/hub"))
        };
        let cache_dir = options
            .cache_dir
            .clone()
            .or_else(|| env("HF_HUB_CACHE").map(PathBuf::from))
            .or_else(|| env("HF_HOME").map(|home| PathBuf::from(home).join("hub")))
            .or_else(home)
            .ok_or_else(|| bad("found no cache folder; set HF_HOME or `cache_dir`".into()))?;
        let yes = |value: String| ["1", "true", "yes", "on"].contains(&value.to_ascii_lowercase().as_str());
        Ok(Self {
            repo: repo.to_string(),
            token: options.token.clone().or_else(|| env("HF_TOKEN")),
            cache: Cache::new(cache_dir),
            offline: options.offline.unwrap_or_else(|| env("HF_HUB_OFFLINE").is_some_and(yes)),
            endpoint: options
                .endpoint
                .clone()
                .or_else(|| env("HF_ENDPOINT"))
                .map(|e| e.trim_end_matches('/').to_string()),
            progress: options.progress,
            revision,
        })
    }

    fn error(&self, why: impl Into<String>) -> Error {
        Error::Hub {
            repo: self.repo.clone(),
            revision: self.revision.clone(),
            why: why.into(),
        }
    }

    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, revision.to_string())
    }

    /// The complete snapshot that the cache holds for the revision.
    fn cached(&self) -> Result<PathBuf> {
        let repo = self.cache.repo(self.at(&self.revision));
        // A commit is its own snapshot; branches and tags are recorded in `refs`.
        let config = repo.get(CONFIG_FILE).or_else(|| {
            let direct = repo.pointer_path(&self.revision).join(CONFIG_FILE);
            direct.is_file().then_some(direct)
        });
        let Some(dir) = config.as_deref().and_then(Path::parent) else {
            return Err(self.error(format!("offline, and no snapshot in {}", self.cache.path().display())));
        };
        // Names the shard that is missing, if one is.
        index::find(dir, &ConfigJson::read(&dir.join(CONFIG_FILE))?)?;
        Ok(dir.to_path_buf())
    }

    fn download(&self) -> Result<PathBuf, Failure> {
        let mut builder = ApiBuilder::from_cache(self.cache.clone())
            .with_progress(self.progress)
            .with_retries(2);
        if let Some(token) = &self.token {
            builder = builder.with_token(Some(token.clone()));
        }
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let api = builder.build().map_err(|e| self.failure("", e))?;
        let info = api.repo(self.at(&self.revision)).info().map_err(|e| self.failure("", e))?;
        if info.sha.is_empty() || !info.sha.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(self.error(format!("found the commit `{}`, expected a hash", info.sha)).into());
        }
        let names: Vec<&str> = info.siblings.iter().map(|s| s.rfilename.as_str()).collect();
        if !names.contains(&CONFIG_FILE) {
            return Err(self.error(format!("no {CONFIG_FILE} in the repository")).into());
        }
        // Every file is asked for by commit, so that a push between two requests cannot mix two versions.
        let commit = api.repo(self.at(&info.sha));
        let config = self.get(&commit, CONFIG_FILE)?;
        let dir = config.parent().unwrap_or(&config).to_path_buf();
        for name in names.iter().filter(|name| is_side_file(name)) {
            self.get(&commit, name)?;
        }
        if names.contains(&SINGLE_FILE) {
            self.get(&commit, SINGLE_FILE)?;
        } else if names.contains(&INDEX_FILE) {
            let path = self.get(&commit, INDEX_FILE)?;
            for shard in index::shard_list(&dir, &path)? {
                self.get(&commit, &shard)?;
            }
        } else {
            return Err(self.error(format!("no {SINGLE_FILE} and no {INDEX_FILE} in the repository")).into());
        }
        self.cache
            .repo(self.at(&self.revision))
            .create_ref(&info.sha)
            .map_err(|e| Error::io(self.cache.path(), "record the revision", e))?;
        Ok(dir)
    }

    fn get(&self, repo: &ApiRepo, name: &str) -> Result<PathBuf, Failure> {
        repo.get(name).map_err(|e| self.failure(name, e))
    }

    fn failure(&self, file: &str, error: ApiError) -> Failure {
        let what = if file.is_empty() { String::new() } else { format!("{file}: ") };
        let text = error.to_string();
        match error {
            ApiError::IoError(source) => Failure::Final(Error::io(self.cache.path(), "write to the cache", source)),
            ApiError::RequestError(_) => match text.split_once("http status: ") {
                Some((_, "401" | "403")) => Failure::Final(self.error(format!(
                    "{what}access denied ({text}); the repository needs a token with access (HF_TOKEN)"
                ))),
                Some((_, "404")) => Failure::Final(self.error(format!("{what}no such repository, revision or file ({text})"))),
                Some(_) => Failure::Final(self.error(format!("{what}{text}"))),
                None => Failure::Unreachable(format!("{what}{text}")),
            },
            _ => Failure::Final(self.error(format!("{what}{text}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(options: &HubOptions, env: &[(&str, &str)]) -> Settings {
        let lookup = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        Settings::new("org/name", options, lookup).unwrap()
    }

    #[test]
    fn environment_fills_what_is_not_given() {
        let env = [
            ("HOME", "/home/u"),
            ("HF_TOKEN", "env-token"),
            ("HF_ENDPOINT", "http://mirror/"),
            ("HF_HUB_OFFLINE", "ON"),
        ];
        let from_env = settings(&HubOptions::default(), &env);
        assert_eq!(from_env.cache.path(), Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!((from_env.revision.as_str(), from_env.offline), ("main", true));
        assert_eq!(from_env.token.as_deref(), Some("env-token"));
        assert_eq!(from_env.endpoint.as_deref(), Some("http://mirror"));
        let options = HubOptions {
            revision: Some("refs/pr/1".into()),
            token: Some("mine".into()),
            cache_dir: Some("/cache".into()),
            offline: Some(false),
            endpoint: Some("http://other".into()),
            progress: false,
        };
        let given = settings(&options, &env);
        assert_eq!(given.cache.path(), Path::new("/cache"));
        assert_eq!((given.revision.as_str(), given.offline), ("refs/pr/1", false));
        assert_eq!(
            (given.token.as_deref(), given.endpoint.as_deref()),
            (Some("mine"), Some("http://other"))
        );
        let caches = [("HF_HOME", "/hf"), ("HOME", "/home/u")];
        assert_eq!(settings(&HubOptions::default(), &caches).cache.path(), Path::new("/hf/hub"));
        assert!(!settings(&HubOptions::default(), &[("HOME", "/h"), ("HF_HUB_OFFLINE", "0")]).offline);
    }

    #[test]
    fn names_that_are_no_repository_are_refused() {
        for repo in ["", "a/b/c", "../up", "org/..", "org/na me", "/abs"] {
            let error = Settings::new(repo, &HubOptions::default(), |_| Some("/x".into())).unwrap_err();
            assert!(error.to_string().contains("org/name"), "{repo}: {error}");
        }
        for revision in ["", "../main", "/main", "a b", "a?b"] {
            let options = HubOptions {
                revision: Some(revision.into()),
                ..HubOptions::default()
            };
            let error = Settings::new("org/name", &options, |_| Some("/x".into())).unwrap_err();
            assert!(error.to_string().contains("branch, tag or commit"), "{revision}: {error}");
        }
        let homeless = Settings::new("org/name", &HubOptions::default(), |_| None).unwrap_err();
        assert!(homeless.to_string().contains("HF_HOME"), "{homeless}");
    }
}
