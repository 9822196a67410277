// Draws the charts of the report from the data in the page. No network; plotly is above.
'use strict';
(() => {
  const root = document.documentElement;
  root.dataset.errors = '';
  const complain = text => { root.dataset.errors += `${text}; `; };
  window.addEventListener('error', event => complain(event.message));
  document.addEventListener('securitypolicyviolation', event => complain(`blocked ${event.blockedURI}`));
  window.addEventListener('unhandledrejection', event => complain(String(event.reason)));

  const data = JSON.parse(document.getElementById('data').textContent);
  const state = { axis: 'time', links: 'bytes', site: Object.keys(data.sites.seconds)[0], hidden: new Set() };
  const css = name => getComputedStyle(root).getPropertyValue(name).trim();
  const phone = () => window.innerWidth < 600;
  // Plotly reads a little HTML in texts, and names come from files.
  const plain = text => String(text).replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  const short = text => {
    const most = phone() ? 14 : 26;
    return plain(text.length > most ? `${text.slice(0, most - 1)}…` : text);
  };
  const faded = (color, alpha) => {
    const n = parseInt(color.slice(1), 16);
    return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
  };
  const shown = () => data.strategies.filter(s => !state.hidden.has(s.name));

  const AXES = {
    step: { key: 'step', title: 'steps', scale: 1, type: 'linear' },
    time: { key: 'time', title: `virtual time, ${data.time.unit} (log scale)`, scale: 1 / data.time.seconds, type: 'log' },
    bytes: { key: 'bytes', title: 'bytes over the WAN (log scale)', scale: 1, type: 'log', suffix: 'B' },
  };

  function axis(extra) {
    return {
      gridcolor: css('--grid'), linecolor: css('--line'), zerolinecolor: css('--line'), zeroline: false,
      tickfont: { color: css('--soft'), size: 12 }, automargin: true, ...extra,
      title: { text: (extra && extra.title) || '', font: { color: css('--soft'), size: 12 }, standoff: 8 },
    };
  }

  function layout(extra) {
    return {
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', showlegend: false, height: 340,
      font: { family: 'system-ui, -apple-system, "Segoe UI", sans-serif', size: 13, color: css('--ink') },
      margin: { l: 44, r: 14, t: 12, b: 44 },
      hoverlabel: { bgcolor: css('--panel'), bordercolor: css('--line'), font: { color: css('--ink') }, align: 'left' },
      legend: { orientation: 'h', traceorder: 'normal', x: 0, y: 1.02, yanchor: 'bottom', font: { color: css('--soft'), size: 12 } },
      ...extra,
    };
  }

  // Faults of a run on an axis of time: shaded from start to end, dotted when only the start is known.
  function faultShapes() {
    const scale = 1 / data.time.seconds;
    return data.faults.map(f => f.to === null
      ? { type: 'line', yref: 'paper', y0: 0, y1: 1, x0: f.from * scale, x1: f.from * scale,
          line: { color: css('--fault'), width: 1.5, dash: 'dot' }, layer: 'below' }
      : { type: 'rect', yref: 'paper', y0: 0, y1: 1, x0: f.from * scale, x1: f.to * scale,
          line: { width: 0 }, fillcolor: faded(css('--fault'), 0.13), layer: 'below' });
  }

  function lines(id, series, yTitle, format, suffix) {
    const x = AXES[state.axis];
    const traces = [];
    const order = shown().slice().sort((a, b) => a.own - b.own); // own strategies last, so that they are on top
    const place = (line, i) => (line[x.key][i] === null ? null : line[x.key][i] * x.scale);
    for (const s of order) {
      const line = series[s.name];
      if (!line.step.length) continue;
      const color = css(s.color);
      const known = line.mean.map((_, i) => i).filter(i => line.mean[i] !== null && place(line, i) !== null);
      if (known.some(i => line.high[i] > line.low[i])) {
        const there = known.map(i => place(line, i));
        traces.push({
          x: [...there, ...there.slice().reverse()], type: 'scatter', mode: 'lines', hoverinfo: 'skip',
          y: [...known.map(i => line.high[i]), ...known.map(i => line.low[i]).reverse()],
          fill: 'toself', fillcolor: faded(color, 0.15), line: { width: 0 },
        });
      }
      const few = line.step.length <= 40;
      traces.push({
        x: line.step.map((_, i) => place(line, i)), y: line.mean, type: 'scatter', mode: few ? 'lines+markers' : 'lines',
        line: { color, width: s.own ? 3.4 : 1.7, dash: s.dash },
        marker: { symbol: s.symbol, size: s.own ? 7 : 5, color },
        text: line.step.map(() => plain(s.name)),
        hovertemplate: `<b>%{text}</b>  %{y:${format}}${suffix}<extra></extra>`,
      });
    }
    const log = x.type === 'log';
    draw(id, traces, layout({
      xaxis: axis({ title: x.title, type: x.type, rangemode: log ? 'normal' : 'tozero',
                    ...(log ? { tickformat: x.suffix ? '~s' : '~g', ticksuffix: x.suffix || '', dtick: 1 } : {}) }),
      yaxis: axis({ title: yTitle }),
      hovermode: 'closest',
      shapes: state.axis === 'time' ? faultShapes() : [],
    }));
  }

  // Horizontal bars: names have room, and a phone has more height than width.
  function bars(id, traces, extra) {
    const names = shown().map(s => s.name);
    draw(id, traces, layout({
      barmode: 'stack', bargap: 0.35, height: Math.max(170, 78 + 34 * names.length),
      yaxis: axis({ type: 'category', autorange: 'reversed', tickvals: names, ticktext: names.map(short),
                    showgrid: false, ticklabelstandoff: 6 }),
      ...extra,
    }));
  }

  function speedup() {
    const rows = data.speedup.filter(row => !state.hidden.has(row.strategy));
    const most = Math.max(1, ...rows.map(row => row.value || 0));
    const longest = Math.max(5, ...rows.map(row => row.text.length)); // "18.8× (1 of 2)" stands behind its bar
    bars('chart-speedup', [{
      type: 'bar', orientation: 'h', y: rows.map(row => row.strategy), x: rows.map(row => row.value || 0),
      marker: { color: rows.map(row => css(data.strategies.find(s => s.name === row.strategy).color)) },
      text: rows.map(row => (row.value === null ? 'not reached' : row.text)), textposition: 'outside', cliponaxis: false,
      textfont: { color: css('--ink') }, hoverinfo: 'none',
    }], {
      xaxis: axis({ title: `times as fast as ${plain(data.reference)}`, range: [0, most * (1.1 + 0.02 * longest)], nticks: 6 }),
      shapes: [{ type: 'line', x0: 1, x1: 1, yref: 'paper', y0: 0, y1: 1,
                 line: { color: css('--soft'), width: 1, dash: 'dot' }, layer: 'below' }],
    });
  }

  function links() {
    const { names, bytes, totals } = data.links;
    const share = state.links === 'share';
    const strategies = shown().map(s => s.name);
    const sums = Object.fromEntries(strategies.map(s => [s, bytes[s].reduce((a, b) => a + b, 0)]));
    const ramp = i => faded(css('--series-0'), 1 - 0.8 * i / Math.max(1, names.length));
    const traces = names.map((name, i) => ({
      type: 'bar', orientation: 'h', name: plain(name), y: strategies, showlegend: true,
      x: strategies.map(s => (share ? 100 * bytes[s][i] / (sums[s] || 1) : bytes[s][i])),
      marker: { color: ramp(i), line: { color: css('--panel'), width: 1 } },
      text: strategies.map(plain), textposition: 'none',
      hovertemplate: `<b>%{text}</b><br>${plain(name)}: ${share ? '%{x:.1f} %' : '%{x:.3s}B'}<extra></extra>`,
    }));
    const most = share ? 100 : Math.max(1, ...Object.values(sums));
    traces.push({
      type: 'scatter', mode: 'text', y: strategies, x: strategies.map(s => (share ? 100 : sums[s])),
      text: strategies.map(s => ` ${totals[s]}`), showlegend: false, textposition: 'middle right', hoverinfo: 'skip', cliponaxis: false,
      textfont: { color: css('--ink') },
    });
    bars('chart-links', traces, {
      showlegend: true,
      height: Math.max(200, 100 + 34 * strategies.length + 18 * Math.ceil(names.length / (phone() ? 1 : 3))),
      xaxis: axis(share ? { title: "% of the strategy's bytes", range: [0, 122], tickvals: [0, 25, 50, 75, 100] }
                      : { title: 'bytes in the whole run', range: [0, most * 1.22], tickformat: '~s', ticksuffix: 'B', nticks: 6 }),
    });
  }

  function sites() {
    const { kinds, seconds } = data.sites;
    const scale = 1 / data.time.seconds;
    const names = shown().map(s => s.name).filter(s => seconds[state.site] && seconds[state.site][s]);
    bars('chart-sites', kinds.map((kind, k) => ({
      type: 'bar', orientation: 'h', name: kind, showlegend: true, y: names,
      x: names.map(s => seconds[state.site][s][k] * scale),
      marker: { color: css(`--kind-${k}`), line: { color: css('--panel'), width: 1 } },
      text: names.map(plain), textposition: 'none',
      hovertemplate: `<b>%{text}</b><br>${kind}: %{x:.3~g} ${data.time.unit}<extra></extra>`,
    })), {
      showlegend: true, height: Math.max(200, 110 + 34 * names.length),
      xaxis: axis({ title: `virtual time of a site, ${data.time.unit}` }),
    });
  }

  // One bar for rounds that follow each other closely, so that a pause shows as a gap.
  function timeline() {
    const scale = 1 / data.time.seconds;
    const traces = shown().map(s => ({
      type: 'bar', orientation: 'h', width: 0.5, y: data.rounds[s.name].map(() => s.name),
      base: data.rounds[s.name].map(r => r.from * scale), x: data.rounds[s.name].map(r => (r.to - r.from) * scale),
      marker: { color: css(s.color), line: { color: css(s.color), width: 1.5 } }, textposition: 'none',
      text: data.rounds[s.name].map(r => `<b>${plain(s.name)}</b><br>${r.count} round${r.count > 1 ? 's' : ''}`),
      hovertemplate: `%{text} from %{base:.4~g} ${data.time.unit}<extra></extra>`,
    }));
    const labels = data.faults.length > 12 ? [] : data.faults.map((f, i) => ({
      x: f.from * scale, y: 1, yref: 'paper', xanchor: 'left', yanchor: 'bottom', yshift: 14 * (2 - i % 3),
      showarrow: false, text: plain(`${f.what} ${f.where}`), font: { size: 11, color: css('--fault') },
    }));
    bars('chart-timeline', traces, {
      barmode: 'overlay', height: Math.max(200, 120 + 30 * traces.length), shapes: faultShapes(), annotations: labels,
      margin: { l: 44, r: 60, t: labels.length ? 58 : 12, b: 44 }, hovermode: 'closest',
      xaxis: axis({ title: `virtual time, ${data.time.unit}`, rangemode: 'tozero' }),
    });
  }

  function draw(id, traces, made) {
    const place = document.getElementById(id);
    if (!place) return;
    Plotly.react(place, traces, made, { displayModeBar: false, responsive: true })
      .then(() => { place.dataset.drawn = String(traces.length); }, reason => complain(`${id}: ${reason}`));
  }

  function everything() {
    lines('chart-accuracy', data.accuracy, 'test accuracy, %', '.2f', ' %');
    lines('chart-loss', data.loss, 'training loss', '.3f', '');
    speedup(); links(); sites(); timeline();
  }

  function legend() {
    const place = document.getElementById('legend');
    for (const s of data.strategies) {
      const button = document.createElement('button');
      const mark = document.createElement('i');
      mark.style.borderTopColor = `var(${s.color})`;
      mark.style.borderTopStyle = s.dash === 'solid' ? 'solid' : s.dash === 'dash' ? 'dashed' : 'dotted';
      const name = document.createElement('span');
      name.textContent = s.name;
      button.append(mark, name);
      button.type = 'button';
      button.title = `show or hide ${s.name}`;
      button.className = s.own ? 'highlight' : '';
      button.setAttribute('aria-pressed', 'true');
      button.addEventListener('click', () => {
        if (!state.hidden.delete(s.name)) state.hidden.add(s.name);
        button.setAttribute('aria-pressed', String(!state.hidden.has(s.name)));
        everything();
      });
      place.append(button);
    }
  }

  function switches() {
    for (const group of document.querySelectorAll('.switch')) {
      const buttons = [...group.querySelectorAll('button')];
      for (const button of buttons) {
        button.addEventListener('click', () => {
          state[group.dataset.sets] = button.value;
          buttons.forEach(b => b.setAttribute('aria-pressed', String(b === button)));
          everything();
        });
      }
    }
    const select = document.getElementById('site');
    if (!select) return;
    for (const name of Object.keys(data.sites.seconds)) select.add(new Option(name, name));
    select.addEventListener('change', () => { state.site = select.value; sites(); });
  }

  legend();
  switches();
  everything();
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', everything);
  window.matchMedia('(max-width: 599px)').addEventListener('change', everything);
})();
