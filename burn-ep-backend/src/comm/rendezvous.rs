//! How the processes of a job find each other.
//!
//! 1. Rank 0 listens on the master port. Every other rank connects (trying again until it listens), says who it is, what it runs
//!    and on which port of its own it can be reached.
//! 2. When all are there and agree, rank 0 sends everybody the list of addresses and a token of this meeting.
//! 3. Rank i connects to the ranks `1..i`; the connection of step 1 serves between rank 0 and the others.
//!
//! Whoever disagrees, and whoever waits in vain, is told why; rank 0 names the ranks that did not come.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Launch, TcpCommunicator};
use crate::error::{OpError, Result};

/// What the other ranks of a job must have the same of: names and values, e.g. a setting that changes the operations called.
pub type Agreement = Vec<(String, String)>;

/// Longest message of the meeting; anything longer is not one of ours.
const MAX_MESSAGE: u32 = 1 << 20;
/// How long a connection may take to say who it is.
const GREETING: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(50);

#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    rank: usize,
    world: usize,
    agreement: Agreement,
    /// Where this rank can be reached.
    address: SocketAddr,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// Addresses of the ranks `1..world`, and the token that connections between them show.
    Welcome {
        addresses: Vec<SocketAddr>,
        token: u64,
    },
    Refused(String),
}

#[derive(Debug, Serialize, Deserialize)]
struct Link {
    rank: usize,
    token: u64,
}

/// Connects all processes of the job, within `timeout`. The version of this crate is always part of the agreement.
///
/// # Errors
/// On every rank: the ranks that did not come, the first setting that differs with both values, or two processes that claim the
/// same rank.
pub fn rendezvous(launch: &Launch, agreement: &Agreement, timeout: Duration) -> Result<TcpCommunicator> {
    let mut agreement = agreement.clone();
    agreement.insert(0, ("burn-ep-backend version".into(), env!("CARGO_PKG_VERSION").into()));
    let meeting = Meeting {
        launch,
        agreement,
        timeout,
        deadline: Instant::now() + timeout,
    };
    let streams = match launch.rank {
        0 => meeting.host(),
        _ => meeting.join(),
    };
    streams
        .and_then(|streams| TcpCommunicator::new(launch.rank, streams).map_err(|e| format!("starting the connections: {e}")))
        .map_err(|why| OpError::Comm {
            rank: launch.rank,
            world: launch.world,
            op: "rendezvous",
            why,
        })
}

type Streams = Vec<Option<TcpStream>>;

struct Meeting<'a> {
    launch: &'a Launch,
    agreement: Agreement,
    timeout: Duration,
    deadline: Instant,
}

impl Meeting<'_> {
    /// Rank 0: collects the others.
    fn host(&self) -> Result<Streams, String> {
        let world = self.launch.world;
        let mut guests: Vec<Option<(TcpStream, SocketAddr)>> = (0..world).map(|_| None).collect();
        if world > 1 {
            let port = self.launch.master_port;
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
                .map_err(|e| format!("listening on port {port}: {e}; set MASTER_PORT (or BURN_MOE_MASTER_PORT) to a free one"))?;
            if let Err(why) = self.receive(&listener, &mut guests) {
                for (stream, _) in guests.iter_mut().flatten() {
                    let _ = write_message(stream, &Answer::Refused(why.clone()));
                }
                return Err(why);
            }
        }
        let addresses: Vec<SocketAddr> = guests.iter().flatten().map(|(_, address)| *address).collect();
        // a fresh hasher is keyed at random
        let token = RandomState::new().build_hasher().finish();
        for (stream, _) in guests.iter_mut().flatten() {
            let answer = Answer::Welcome {
                addresses: addresses.clone(),
                token,
            };
            write_message(stream, &answer).map_err(|e| format!("answering a rank: {e}"))?;
        }
        Ok(guests.into_iter().map(|guest| guest.map(|(stream, _)| stream)).collect())
    }

    /// Fills `guests[1..]`.
    fn receive(&self, listener: &TcpListener, guests: &mut [Option<(TcpStream, SocketAddr)>]) -> Result<(), String> {
        while guests[1..].iter().any(Option::is_none) {
            let missing = || {
                let missing: Vec<usize> = (1..guests.len()).filter(|&r| guests[r].is_none()).collect();
                format!(
                    "waited {:?} on port {} for ranks {missing:?}; start them with the same MASTER_ADDR and MASTER_PORT",
                    self.timeout, self.launch.master_port
                )
            };
            let mut stream = self.accept(listener, missing)?;
            let hello = match read_message::<Hello>(&mut stream) {
                Ok(hello) => hello,
                Err(error) => {
                    tracing::warn!("rendezvous: a connection that is no rank of this job: {error}");
                    continue;
                }
            };
            if let Err(why) = self.check(&hello, guests) {
                let _ = write_message(&mut stream, &Answer::Refused(why.clone()));
                return Err(why);
            }
            guests[hello.rank] = Some((stream, hello.address));
        }
        Ok(())
    }

    fn check(&self, hello: &Hello, guests: &[Option<(TcpStream, SocketAddr)>]) -> Result<(), String> {
        let (rank, world) = (hello.rank, self.launch.world);
        if hello.world != world {
            return Err(format!("rank {rank} counts {} ranks, rank 0 counts {world}", hello.world));
        }
        if rank == 0 || rank >= world {
            return Err(format!("a second process says it is rank {rank} of {world}"));
        }
        if guests[rank].is_some() {
            return Err(format!("two processes say they are rank {rank}"));
        }
        if hello.agreement == self.agreement {
            return Ok(());
        }
        for ((name, ours), (other_name, theirs)) in self.agreement.iter().zip(&hello.agreement) {
            if name != other_name || ours != theirs {
                return Err(format!(
                    "{name} is {ours} on rank 0, {other_name} is {theirs} on rank {rank}; start all ranks with the same program and settings"
                ));
            }
        }
        Err(format!(
            "rank 0 states {} settings, rank {rank} states {}",
            self.agreement.len(),
            hello.agreement.len()
        ))
    }

    /// Every other rank.
    fn join(&self) -> Result<Streams, String> {
        let Launch {
            rank,
            world,
            master_addr,
            master_port,
            ..
        } = self.launch;
        let mut master = self.connect(&format!("rank 0 at {master_addr}:{master_port}"), || {
            (master_addr.as_str(), *master_port).to_socket_addrs()
        })?;
        // Reachable for the others as it is for rank 0.
        let ip = master.local_addr().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address| address.ip());
        let listener = TcpListener::bind((ip, 0)).map_err(|e| format!("listening on {ip}: {e}"))?;
        let address = listener.local_addr().map_err(|e| format!("listening on {ip}: {e}"))?;
        let hello = Hello {
            rank: *rank,
            world: *world,
            agreement: self.agreement.clone(),
            address,
        };
        write_message(&mut master, &hello).map_err(|e| format!("greeting rank 0: {e}"))?;
        // Rank 0 answers when all are there, at the latest when its own wait is over.
        let patience = self.remaining() + GREETING;
        master.set_read_timeout(Some(patience)).map_err(|e| e.to_string())?;
        let answer = read_message::<Answer>(&mut master)
            .map_err(|e| format!("waited {:?} for rank 0 to say that all {world} ranks are there: {e}", self.timeout))?;
        let (addresses, token) = match answer {
            Answer::Welcome { addresses, token } if addresses.len() + 1 == *world => (addresses, token),
            Answer::Welcome { addresses, .. } => return Err(format!("rank 0 named {} ranks of {world}", addresses.len() + 1)),
            Answer::Refused(why) => return Err(why),
        };

        let mut streams: Streams = (0..*world).map(|_| None).collect();
        streams[0] = Some(master);
        for (peer, address) in (1..*rank).zip(&addresses) {
            let mut stream = self.connect(&format!("rank {peer} at {address}"), || address.to_socket_addrs())?;
            write_message(&mut stream, &Link { rank: *rank, token }).map_err(|e| format!("greeting rank {peer}: {e}"))?;
            streams[peer] = Some(stream);
        }
        while streams[rank + 1..].iter().any(Option::is_none) {
            let missing = || {
                let missing: Vec<usize> = (rank + 1..*world).filter(|&r| streams[r].is_none()).collect();
                format!("waited {:?} for the connections of ranks {missing:?} to {address}", self.timeout)
            };
            let mut stream = self.accept(&listener, missing)?;
            match read_message::<Link>(&mut stream) {
                Ok(link) if link.token == token && link.rank > *rank && link.rank < *world => streams[link.rank] = Some(stream),
                Ok(link) => tracing::warn!("rendezvous: rank {} of another job connected", link.rank),
                Err(error) => tracing::warn!("rendezvous: a connection that is no rank of this job: {error}"),
            }
        }
        Ok(streams)
    }

    fn remaining(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// The next connection; `missing` says who did not come in time.
    fn accept(&self, listener: &TcpListener, missing: impl Fn() -> String) -> Result<TcpStream, String> {
        let wrong = |e: io::Error| format!("waiting for connections: {e}");
        listener.set_nonblocking(true).map_err(wrong)?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(wrong)?;
                    stream.set_read_timeout(Some(GREETING)).map_err(wrong)?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(wrong(error)),
            }
            if self.remaining().is_zero() {
                return Err(missing());
            }
            thread::sleep(RETRY.min(self.remaining()));
        }
    }

    /// Tries until `who` listens; names are looked up anew each time, since a host may still be starting.
    fn connect<I: Iterator<Item = SocketAddr>>(&self, who: &str, addresses: impl Fn() -> io::Result<I>) -> Result<TcpStream, String> {
        let mut last = String::from("the name has no address");
        loop {
            match addresses() {
                Ok(list) => {
                    for address in list {
                        match TcpStream::connect_timeout(&address, self.remaining().max(RETRY)) {
                            Ok(stream) => return Ok(stream),
                            Err(error) => last = error.to_string(),
                        }
                    }
                }
                Err(error) => last = error.to_string(),
            }
            if self.remaining().is_zero() {
                return Err(format!(
                    "waited {:?} for {who}: {last}; check MASTER_ADDR and MASTER_PORT",
                    self.timeout
                ));
            }
            thread::sleep(RETRY.min(self.remaining()));
        }
    }
}

fn write_message(stream: &mut TcpStream, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let len = u32::try_from(text.len()).map_err(io::Error::other)?;
    stream.write_all(&len.to_le_bytes())?;
    stream.write_all(&text)
}

fn read_message<T: for<'a> Deserialize<'a>>(stream: &mut TcpStream) -> io::Result<T> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if len > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {len} bytes")));
    }
    let mut text = vec![0; len as usize];
    stream.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"]
mod tests;
