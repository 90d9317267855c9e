//! Processes as ranks, with a TCP connection between every two.
//!
//! The transport of CPU processes, and the control channel of those with GPUs. Every rank sends each peer its part of an
//! operation and a reader thread for each peer posts what arrives; a reduction therefore moves `world - 1` copies of the
//! values, which suits small groups.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::Ranks;
use super::hub::{DEFAULT_TIMEOUT, Hub, Member, Wire, communicate_as_member};
use super::round::{Call, Part};

/// How long news of a failure may be behind the broken connection that it caused.
const NEWS: Duration = Duration::from_secs(3);

/// One rank of a group of processes; [`rendezvous`](super::rendezvous::rendezvous) makes it.
///
/// Ends with an error like [`LocalCommunicator`](super::LocalCommunicator); a rank whose process dies is noticed when its
/// connections close, at once.
#[derive(Debug)]
pub struct TcpCommunicator {
    member: Member,
    peers: Arc<Peers>,
}

impl TcpCommunicator {
    /// `streams[r]` is the connection to rank r, None for this rank.
    pub(super) fn new(rank: usize, streams: Vec<Option<TcpStream>>) -> io::Result<Self> {
        let hub = Hub::new(streams.len(), false);
        let mut writers = Vec::with_capacity(streams.len());
        for (peer, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                writers.push(None);
                continue;
            };
            stream.set_nodelay(true)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(DEFAULT_TIMEOUT))?;
            let (reader, hub) = (stream.try_clone()?, hub.clone());
            thread::Builder::new()
                .name(format!("rank {peer} to {rank}"))
                .spawn(move || read_parts(reader, peer, &hub))?;
            writers.push(Some(Mutex::new(stream)));
        }
        let peers = Arc::new(Peers { writers, hub: hub.clone() });
        Ok(Self {
            member: Member {
                group: Ranks::all(peers.writers.len()),
                index: rank,
                timeout: DEFAULT_TIMEOUT,
                hub,
                wire: Some(Arc::new(peers.clone())),
            },
            peers,
        })
    }

    /// The same rank with another limit for each wait (10 minutes by default).
    ///
    /// # Errors
    /// A limit of zero.
    pub fn with_timeout(mut self, timeout: Duration) -> io::Result<Self> {
        for stream in self.peers.writers.iter().flatten() {
            lock(stream).set_write_timeout(Some(timeout))?;
        }
        self.member.timeout = timeout;
        Ok(self)
    }
}

communicate_as_member!(TcpCommunicator);

impl Drop for TcpCommunicator {
    fn drop(&mut self) {
        for stream in self.peers.writers.iter().flatten() {
            let mut stream = lock(stream);
            let _ = write_frame(&mut stream, Kind::Leave, Ranks::all(0), 0, Call::new("barrier"), &[]);
            // The other direction stays open until the peer closes it: closing with unread data could lose what was just sent.
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

/// Connections to the other ranks.
#[derive(Debug)]
struct Peers {
    writers: Vec<Option<Mutex<TcpStream>>>,
    hub: Arc<Hub>,
}

impl Wire for Arc<Peers> {
    fn send(&self, group: Ranks, sequence: u64, call: Call, part: &mut Part) -> Result<(), String> {
        for index in 0..group.len {
            let peer = group.member(index);
            let Some(stream) = &self.writers[peer] else { continue };
            let payload = encode(part.share(index));
            if let Err(error) = write_frame(&mut lock(stream), Kind::Part, group, sequence, call, &payload) {
                // A peer that gave up has said why before it closed the connection.
                return Err(match self.hub.failure(NEWS) {
                    Some(why) => format!("the group has ended: {why}"),
                    None => format!("operation {sequence}: sending to rank {peer}: {error}; its process may have ended"),
                });
            }
        }
        Ok(())
    }

    fn send_end(&self, why: &str) {
        for stream in self.writers.iter().flatten() {
            let _ = write_frame(&mut lock(stream), Kind::End, Ranks::all(0), 0, Call::new("barrier"), why.as_bytes());
        }
    }
}

fn lock(stream: &Mutex<TcpStream>) -> std::sync::MutexGuard<'_, TcpStream> {
    // A panic while writing leaves half a frame, which the peer reports.
    stream.lock().unwrap_or_else(|e| e.into_inner())
}

/// Operations by number on the wire.
const OPS: [&str; 5] = ["all_to_all", "all_gather", "all_reduce_sum", "all_reduce_sum_f64", "barrier"];
const HEADER: usize = 44;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Part = 0x4550_0001,
    End = 0x4550_0002,
    Leave = 0x4550_0003,
}

/// `kind u32, op u32, sequence u64, values + 1 or 0 u64, payload bytes u64, group (first, step, len) 3 x u32`, little-endian,
/// then the payload.
fn write_frame(stream: &mut TcpStream, kind: Kind, group: Ranks, sequence: u64, call: Call, payload: &[u8]) -> io::Result<()> {
    let op = OPS.iter().position(|op| *op == call.op).unwrap_or(OPS.len());
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
    header[4..8].copy_from_slice(&(op as u32).to_le_bytes());
    header[8..16].copy_from_slice(&sequence.to_le_bytes());
    header[16..24].copy_from_slice(&call.len.map_or(0, |len| len as u64 + 1).to_le_bytes());
    header[24..32].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    for (at, number) in [(32, group.first), (36, group.step), (40, group.len)] {
        header[at..at + 4].copy_from_slice(&(number as u32).to_le_bytes());
    }
    stream.write_all(&header)?;
    stream.write_all(payload)
}

/// Posts what `peer` sends until it leaves.
fn read_parts(mut stream: TcpStream, peer: usize, hub: &Hub) {
    let how = loop {
        match read_frame(&mut stream) {
            Ok((Kind::Part, group, sequence, call, payload)) => {
                let Ok(index) = group.check(peer, hub.world()) else {
                    break format!("sent a part of a group it is not in ({group})");
                };
                let posted = decode(call, payload).and_then(|part| hub.post(group, index, call, part));
                match posted {
                    Ok(expected) if expected == sequence => {}
                    Ok(expected) => break format!("sent operation {sequence} where {expected} comes next"),
                    Err(why) => break why,
                }
            }
            Ok((Kind::End, _, _, _, payload)) => {
                hub.end(|| String::from_utf8_lossy(&payload).into_owned());
                return;
            }
            Ok((Kind::Leave, ..)) => return hub.leave(peer, "left the group"),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => break error.to_string(),
            Err(error) => return hub.leave(peer, &format!("is gone (its process or connection ended: {error})")),
        }
    };
    hub.end(|| format!("rank {peer}: {how}"));
}

fn read_frame(stream: &mut TcpStream) -> io::Result<(Kind, Ranks, u64, Call, Vec<u8>)> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("4 bytes"));
    let long = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let kind = [Kind::Part, Kind::End, Kind::Leave]
        .into_iter()
        .find(|kind| *kind as u32 == word(0))
        .ok_or_else(|| invalid(format!("a frame of unknown kind {:#x}", word(0))))?;
    let op = *OPS
        .get(word(4) as usize)
        .ok_or_else(|| invalid(format!("an unknown operation {}", word(4))))?;
    let len = long(16).checked_sub(1).map(|len| len as usize);
    // Grows as bytes arrive: a wrong length must not allocate.
    let mut payload = Vec::new();
    stream.take(long(24)).read_to_end(&mut payload)?;
    if payload.len() as u64 != long(24) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let group = Ranks {
        first: word(32) as usize,
        step: word(36) as usize,
        len: word(40) as usize,
    };
    Ok((kind, group, long(8), Call { op, len }, payload))
}

fn encode(part: Part) -> Vec<u8> {
    match part {
        Part::Nothing | Part::ForEach(_) => Vec::new(),
        Part::ForOne(bytes) => bytes,
        Part::ForAll(bytes) => bytes.to_vec(),
        Part::F32(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Part::F64(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

fn decode(call: Call, payload: Vec<u8>) -> Result<Part, String> {
    let size = if call.op == "all_reduce_sum_f64" { 8 } else { 4 };
    if let Some(len) = call.len
        && len.checked_mul(size) != Some(payload.len())
    {
        return Err(format!("{} bytes for {call}", payload.len()));
    }
    Ok(match call.op {
        "all_to_all" => Part::ForOne(payload),
        "all_gather" => Part::ForAll(Arc::new(payload)),
        "all_reduce_sum" => Part::F32(Arc::new(
            payload.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        )),
        "all_reduce_sum_f64" => Part::F64(Arc::new(
            payload.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        )),
        _ => Part::Nothing,
    })
}
