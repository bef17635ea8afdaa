//! kvload: loads a key-value store, then sends requests with a hot set of keys.
//!
//! With probability `--weight`, a request goes to one of the hot keys, which were loaded last. Every returned value is
//! verified.

use std::io::{self, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;

use super::args::Common;
use super::event::{Output, Rate, WorkloadEvent};
use super::rng::{Rng, mix, scale};
use super::store::Protocol;
use super::tagged_words::hot_below;
use super::wait::Waiter;
use super::{Error, Size, single_worker};

/// Time limit of an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Maximum value size, as requests are held in memory.
const VALUE_BYTES_MAX: u64 = 1 << 20;

/// Loads a key-value store, then asks it for keys with a hot set
#[derive(Debug, Clone, Parser)]
#[command(name = "kvload", version)]
pub struct KvLoad {
    /// How to speak to the store
    #[arg(long, value_enum, default_value = "redis")]
    protocol: Protocol,
    /// The port that it listens on, on this machine
    #[arg(long, default_value_t = 6379)]
    port: u16,
    /// Keys
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    keys: u64,
    /// Size of each value
    #[arg(long, default_value = "1KiB")]
    value: Size,
    /// Share of the keys that is hot: those that were loaded last
    #[arg(long, default_value = "0.1", value_parser = share)]
    hot: f64,
    /// Share of the requests that goes to hot keys
    #[arg(long, default_value = "0.9", value_parser = share)]
    weight: f64,
    /// Share of the requests that stores a value again
    #[arg(long, default_value = "0.1", value_parser = share)]
    sets: f64,
    /// Requests that are sent before the first answer is read
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: u32,
    #[command(flatten)]
    common: Common,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("needs a number from 0 to 1".into()),
    }
}

/// Runs kvload with these arguments. An operation is a request with its answer.
pub fn run(args: &KvLoad) -> Result<(), Error> {
    if !(8..=VALUE_BYTES_MAX).contains(&args.value.bytes) {
        return Err(Error::Arguments("--value: from 1KiB to 1MiB".into()));
    }
    let output = Output {
        json: args.common.json,
    };
    let waiter = Waiter::new()?;
    let mut client = Client::connect(args)?;
    let depth = u64::from(args.depth);
    for first in (0..args.keys).step_by(args.depth as usize) {
        waiter.check()?;
        let keys = first..(first + depth).min(args.keys);
        let requests: Vec<Request> = keys.map(Request::Set).collect();
        client.ask(&requests).map_err(fault)?;
    }
    output.say(&WorkloadEvent::Loaded {
        keys: args.keys,
        value_bytes: args.value.bytes,
    })?;
    let client = Mutex::new(client);
    single_worker::run(&args.common, &waiter, Rate::requests, |control| {
        let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rng = Rng::new(args.common.seed, 1);
        while control.stage().is_some() {
            let requests: Vec<Request> = (0..depth).map(|_| pick(args, &mut rng)).collect();
            client.ask(&requests).map_err(fault)?;
            control.done(0, depth);
        }
        Ok(())
    })
}

/// One request: a key by its number.
#[derive(Debug, Clone, Copy)]
enum Request {
    Get(u64),
    Set(u64),
}

/// A random request.
fn pick(args: &KvLoad, rng: &mut Rng) -> Request {
    let hot = ((args.keys as f64 * args.hot).round() as u64).clamp(1, args.keys);
    let cold = args.keys - hot;
    let random = rng.next();
    let key = if cold == 0 || random & 0xffff_ffff < hot_below(args.weight) {
        cold + scale(random, hot)
    } else {
        scale(random, cold)
    };
    match rng.next() & 0xffff_ffff < hot_below(args.sets) {
        true => Request::Set(key),
        false => Request::Get(key),
    }
}

fn fault(error: io::Error) -> Error {
    Error::Server(error.to_string())
}

/// A connection to a store.
struct Client {
    protocol: Protocol,
    seed: u64,
    stream: TcpStream,
    answers: BufReader<TcpStream>,
    requests: Vec<u8>,
    value: Vec<u8>,
    expected: Vec<u8>,
}

impl Client {
    fn connect(args: &KvLoad) -> Result<Self, Error> {
        let port = args.port;
        let connected = || -> io::Result<(TcpStream, TcpStream)> {
            let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(ANSWER_LIMIT))?;
            stream.set_write_timeout(Some(ANSWER_LIMIT))?;
            let answers = stream.try_clone()?;
            Ok((stream, answers))
        };
        let (stream, answers) = connected().map_err(|source| Error::System {
            what: format!("cannot connect to the store on port {port}"),
            source,
        })?;
        let bytes = args.value.bytes as usize;
        Ok(Self {
            protocol: args.protocol,
            seed: args.common.seed,
            stream,
            answers: BufReader::with_capacity(1 << 16, answers),
            requests: vec![],
            value: vec![0; bytes],
            expected: vec![0; bytes],
        })
    }

    /// Sends all requests, then reads and verifies all answers.
    fn ask(&mut self, requests: &[Request]) -> io::Result<()> {
        self.requests.clear();
        for request in requests {
            match *request {
                Request::Get(number) => {
                    self.protocol.ask_get(&mut self.requests, &key(number))?;
                }
                Request::Set(number) => {
                    fill(&mut self.expected, number, self.seed);
                    let to = &mut self.requests;
                    self.protocol.ask_set(to, &key(number), &self.expected)?;
                }
            }
        }
        self.stream.write_all(&self.requests)?;
        for request in requests {
            match *request {
                Request::Get(number) => {
                    let key = key(number);
                    self.protocol
                        .got(&mut self.answers, &key, &mut self.value)?;
                    fill(&mut self.expected, number, self.seed);
                    if self.value != self.expected {
                        let what = format!("gave a wrong value for {key}: memory lost data");
                        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                    }
                }
                Request::Set(_) => self.protocol.was_set(&mut self.answers)?,
            }
        }
        Ok(())
    }
}

fn key(number: u64) -> String {
    format!("key:{number:010}")
}

/// The value of a key.
fn fill(value: &mut [u8], number: u64, seed: u64) {
    let word = mix(number ^ mix(seed)).to_le_bytes();
    for chunk in value.chunks_mut(word.len()) {
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}
